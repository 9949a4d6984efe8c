"""The forward pass of the decoder family (Qwen2, Qwen2.5, Qwen3, Llama), written once.

Read it top to bottom: one line an operation, each ending with the shape it makes. Nothing is computed here; the
interpreters in `reference.py` and `native.py` do that. Read next: `reference.py`, the definition of
every operation.

T = num_tokens, R = num_outputs.
"""

from __future__ import annotations

from cutaway.config import ModelConfig
from cutaway.forward.program import Program

__all__ = ["decoder"]


def decoder(config: ModelConfig) -> Program:
    """Write the Program of a model from its config. Weight names are the op's name + `.weight` / `.bias`."""
    p = Program(config)
    q_width, kv_width = config.q_width, config.kv_width

    x = p.embed("embed", "model.embed_tokens")  # [T, hidden]
    for i in range(config.num_layers):
        with p.layer(i):
            h = p.rms_norm("attn_norm", x, "input_layernorm")  # [T, hidden]
            q = p.linear("attn.q", h, q_width, "self_attn.q_proj", config.qkv_bias)  # [T, num_heads * head_dim]
            k = p.linear("attn.k", h, kv_width, "self_attn.k_proj", config.qkv_bias)  # [T, num_kv_heads * head_dim]
            v = p.linear("attn.v", h, kv_width, "self_attn.v_proj", config.qkv_bias)  # [T, num_kv_heads * head_dim]
            if config.qk_norm:
                q = p.head_norm("attn.q_norm", q, "self_attn.q_norm")  # [T, num_heads * head_dim]
                k = p.head_norm("attn.k_norm", k, "self_attn.k_norm")  # [T, num_kv_heads * head_dim]
            q = p.rope("attn.q_rope", q)  # [T, num_heads * head_dim]
            k = p.rope("attn.k_rope", k)  # [T, num_kv_heads * head_dim]
            a = p.attention("attn.mix", q, k, v)  # [T, num_heads * head_dim]
            a = p.linear("attn.o", a, config.hidden, "self_attn.o_proj", config.o_bias)  # [T, hidden]
            x = p.add("attn_residual", x, a)  # [T, hidden]
            h = p.rms_norm("mlp_norm", x, "post_attention_layernorm")  # [T, hidden]
            g = p.linear("mlp.gate", h, config.intermediate, "mlp.gate_proj", config.mlp_bias)  # [T, intermediate]
            u = p.linear("mlp.up", h, config.intermediate, "mlp.up_proj", config.mlp_bias)  # [T, intermediate]
            m = p.silu_mul("mlp.act", g, u)  # [T, intermediate]
            d = p.linear("mlp.down", m, config.hidden, "mlp.down_proj", config.mlp_bias)  # [T, hidden]
            x = p.add("residual", x, d, ".")  # [T, hidden]
    x = p.select_rows("outputs", x)  # [R, hidden]
    x = p.rms_norm("final_norm", x, "model.norm")  # [R, hidden]
    head = "embed.weight" if config.tied_head else "head.weight"
    p.linear("logits", x, config.vocab, "lm_head", weight=head)  # [R, vocab]
    return p
