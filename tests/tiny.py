"""Tiny random models for the tests: every config variant this family has, with weights in any format.

`VARIANTS` are configs; `random_weights` makes the weights of one; `transformers_model` puts the same (dequantised)
weights into the transformers class of that architecture; `save` writes it as a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cutaway import quant
from cutaway.config import ModelConfig, RopeScaling
from cutaway.forward.decoder import decoder
from cutaway.forward.program import Program
from cutaway.quant import Weight

TINY = ModelConfig(
    architecture="qwen2",
    vocab=97,
    hidden=64,
    intermediate=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_context=2048,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    qkv_bias=True,
    tied_head=True,
)
QWEN3 = replace(TINY, architecture="qwen3", qkv_bias=False, qk_norm=True)
LLAMA = replace(TINY, architecture="llama", qkv_bias=False, rms_norm_eps=1e-5, rope_theta=500000.0)

LLAMA3 = RopeScaling("llama3", 8.0, original_max_context=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, original_max_context=64)

VARIANTS: dict[str, ModelConfig] = {
    "qwen2": TINY,
    "qwen2-untied": replace(TINY, tied_head=False),
    "qwen2-group-7": replace(TINY, hidden=112, num_heads=14, num_kv_heads=2, head_dim=8),
    "qwen2-explicit-head-dim": replace(TINY, head_dim=32),
    "qwen2-rows-of-256": replace(TINY, hidden=256, intermediate=512, num_heads=8, head_dim=32),  # for the K formats
    "qwen2-yarn": replace(TINY, max_context=256, rope_scaling=YARN),
    "qwen3": QWEN3,
    "qwen3-untied-explicit-head-dim": replace(QWEN3, tied_head=False, head_dim=32, num_kv_heads=1),
    "qwen3-yarn": replace(
        QWEN3, max_context=256, rope_scaling=replace(YARN, attention_factor=1.25, beta_fast=16.0, truncate=False)
    ),
    "qwen3-attention-bias": replace(QWEN3, qkv_bias=True, o_bias=True),
    "llama": LLAMA,
    "llama-group-1-untied": replace(LLAMA, num_kv_heads=4, tied_head=False),
    "llama-all-biases": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama-linear": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0)),
    "llama-llama3": replace(LLAMA, rope_scaling=LLAMA3),
    "llama-yarn-mscale": replace(LLAMA, max_context=256, rope_scaling=replace(YARN, mscale=1.0, mscale_all_dim=0.8)),
}

K_QUANT_MIDDLES = {"Q2_K": 1.5, "Q3_K": None, "Q4_K": 7.5, "Q5_K": 15.5, "Q6_K": None}  # the middle of 0..max code
K_QUANT_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}  # where d lies, and m after it


def random_weight(name: str, shape: tuple[int, ...], format: str, rng: np.random.Generator) -> Weight:
    """Values such that every operation matters: rows keep a vector's length, norms and biases are not 1 and 0."""
    if len(shape) == 1:
        values = np.float32(rng.normal(0, 0.3, shape) + (1 if "norm" in name else 0))
        return Weight(name, "F32", shape, values.view(np.uint8).reshape(1, -1))
    rows, columns = shape
    # An embedding as small as what a layer adds: a tied head would otherwise only repeat its input.
    spread = 0.35 if name == "embed.weight" else columns**-0.5
    if format in K_QUANT_SCALE_AT:
        return Weight(name, format, shape, _random_k_quant(format, rows, columns, spread, rng))
    values = rng.normal(0, spread, shape).astype(np.float32)
    return Weight(name, format, shape, values.view(np.uint8) if format == "F32" else quant.quantize(format, values))


def _random_k_quant(format: str, rows: int, columns: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """Random codes and group scales, with d (and m) set so that the values spread about 0 as asked."""
    group_bytes = quant.FORMATS[format].group_bytes
    data = rng.integers(0, 256, (rows, columns // 256, group_bytes), dtype=np.uint8)
    at, middle = K_QUANT_SCALE_AT[format], K_QUANT_MIDDLES[format]

    def fill(d: np.ndarray) -> np.ndarray:
        data[:, :, at : at + 2] = d.astype("<f2")[..., None].view(np.uint8)
        if middle is not None:
            data[:, :, at + 2 : at + 4] = (middle * d).astype("<f2")[..., None].view(np.uint8)
        return data.reshape(rows, -1)

    unit = quant.dequantize(format, fill(np.ones(data.shape[:2]))).std()
    return fill(rng.uniform(0.5, 1.5, data.shape[:2]) * spread / unit).copy()


def random_weights(program: Program, format: str = "F32", seed: int = 0) -> dict[str, Weight]:
    """Weights of `program`: matrices in `format` ("mixed": a format each, by turns), vectors in F32."""
    rng = np.random.default_rng(seed)
    mixed = ("Q5_0", "Q8_0", "F16", "Q4_0", "Q4_1", "BF16", "Q5_1", "F32")
    return {
        name: random_weight(name, shape, mixed[index % len(mixed)] if format == "mixed" else format, rng)
        for index, (name, shape) in enumerate(program.weight_shapes.items())
    }


# -- the same model in transformers ----------------------------------------------------------------------------------


def transformers_config(config: ModelConfig) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling.kind != "none":
        rope.update(rope_type=scaling.kind, factor=scaling.factor)
    if scaling.kind in ("llama3", "yarn"):
        rope.update(original_max_position_embeddings=scaling.original_max_context)
    if scaling.kind == "llama3":
        rope.update(low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor)
    if scaling.kind == "yarn":
        given = {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.attention_factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
        rope.update({key: value for key, value in given.items() if value is not None})
    biases = {} if config.architecture == "qwen2" else {"attention_bias": config.qkv_bias}
    if config.architecture == "llama":
        biases["mlp_bias"] = config.mlp_bias
    return {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[config.architecture](
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tied_head,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **biases,
    )


def module_weights(program: Program) -> dict[str, str]:
    """Name in transformers' state dict -> name in the Program, from the modules the Program's operations name."""
    return {f"{op.module}.{name.rsplit('.', 1)[1]}": name for op in program for name in op.weights}


def transformers_model(program: Program, weights: Mapping[str, Weight], dtype: Any = None) -> Any:
    """The transformers model with these weights, dequantised, in torch.float32 or as `dtype` says; eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = dtype or torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(program.config), attn_implementation="eager")
    model = model.to(dtype).to_empty(device="cpu")
    state = {
        key: torch.from_numpy(weights[name].dequantize()).to(dtype) for key, name in module_weights(program).items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not missing, missing
    assert not unexpected, unexpected
    # The table of frequencies is no weight: it is computed when the module is built, which "meta" put off.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval().requires_grad_(False)


def save(folder: Path, config: ModelConfig = TINY, format: str = "F32", seed: int = 0) -> Path:
    """Write a random model as a Hugging Face folder (config.json, model.safetensors) and give the folder back."""
    program = decoder(config)
    transformers_model(program, random_weights(program, format, seed)).save_pretrained(folder)
    return folder
