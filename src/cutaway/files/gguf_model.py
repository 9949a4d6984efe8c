"""A GGUF file as a model: its keys as a config and a vocabulary, its tensors as weights.

Read next: `hf_model.py`, the same for Hugging Face folders; `checkpoint.py`, which chooses between them.

Source: ggml `docs/gguf.md` for the keys; llama.cpp's converter for the order of llama's q and k rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutaway.config import ModelConfig, RopeScaling
from cutaway.errors import FormatError, UnsupportedError
from cutaway.files.fields import Fields
from cutaway.files.gguf import GGUF, StringArray
from cutaway.files.weights import ARCHITECTURES, check_config, collect, yarn_context
from cutaway.quant import Weight
from cutaway.text.tokenizer import Vocabulary

__all__ = ["read_config", "read_eos_ids", "read_generation", "read_vocabulary", "read_weights"]

CONTROL = 3  # token type
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3")  # splits whose models begin with a BOS token unless the file says no
# Converters keep one end-of-sequence id where a model has several; these control tokens always end a turn or a text.
END_TOKENS = frozenset(["<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"])


def read_config(gguf: GGUF) -> ModelConfig:
    """Raises: FormatError (a key is missing or senseless), UnsupportedError (a key asks for what is missing here)."""
    architecture = Fields(gguf.path, gguf.metadata).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(f"{gguf.path}: architecture", found=architecture, expected=" ".join(ARCHITECTURES))
    fields = Fields(gguf.path, gguf.metadata, f"{architecture}.")
    tensors = gguf.tensors
    for key, *harmless in (
        ("expert_count", 0),
        ("attention.causal", True),
        ("attention.scale", 0.0),
        ("attention.sliding_window", 0),
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
        ("embedding_scale", 0.0, 1.0),
        ("residual_scale", 0.0, 1.0),
        ("logit_scale", 0.0, 1.0),
        ("rope.scale_linear", 1.0),
        ("rope.dimension_sections",),
    ):
        fields.refuse(key, tuple(harmless))
    if "token_embd.weight" not in tensors:
        raise FormatError(f"{gguf.path}: tensor token_embd.weight is missing")
    hidden, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            what = f"{gguf.path}: {fields.prefix}{key} other than the head dimension is not implemented"
            raise UnsupportedError(what, found=fields.get(key), expected=head_dim)
    scaling = _rope_scaling(gguf, fields, head_dim)
    return check_config(
        gguf.path,
        ModelConfig(
            architecture=architecture,
            vocab=tensors["token_embd.weight"].shape[0],
            hidden=hidden,
            intermediate=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_context=yarn_context(scaling, fields.integer("context_length")),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10000.0),
            rope_scaling=scaling,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            qk_norm=architecture == "qwen3",
            tied_head="output.weight" not in tensors,
        ),
    )


def _rope_scaling(gguf: GGUF, fields: Fields, head_dim: int) -> RopeScaling:
    factors = gguf.tensors.get("rope_freqs.weight")
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none" and factors is not None:
        if factors.format != "F32" or factors.shape != (head_dim // 2,):
            found = f"{factors.format} {list(factors.shape)}"
            raise FormatError(f"{gguf.path}: tensor rope_freqs.weight", found=found, expected=f"F32 [{head_dim // 2}]")
        values = tuple(factors.dequantize().tolist())
        if not all(1e-6 < value < 1e12 for value in values):
            raise FormatError(f"{gguf.path}: tensor rope_freqs.weight", expected="numbers between 1e-6 and 1e12")
        return RopeScaling("llama3", frequency_factors=values)
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn") or factors is not None:
        kind += " with rope_freqs.weight" if factors is not None else ""
        raise UnsupportedError(f"{gguf.path}: {fields.prefix}rope.scaling.type", found=kind, expected="linear or yarn")
    factor = fields.number("rope.scaling.factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    fields.refuse("rope.scaling.yarn_ext_factor", (1.0,))
    fields.refuse("rope.scaling.yarn_log_multiplier", (0.0,))
    attention = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        "yarn",
        factor,
        original_max_context=fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if attention == 1.0 else attention * (0.1 * float(np.log(factor)) + 1.0),
    )


def read_weights(gguf: GGUF, config: ModelConfig) -> dict[str, Weight]:
    """The weights under our names: views of the file, but for llama's q and k, whose rows change places."""
    weights = collect(config, gguf.tensors, gguf.path, gguf=True, harmless={"rope_freqs.weight"}.__contains__)
    if config.architecture == "llama":
        for name, weight in weights.items():
            if ".attn.q." in name or ".attn.k." in name:
                weight.data = _rows_by_halves(weight, config.head_dim)
    return weights


def _rows_by_halves(weight: Weight, head_dim: int) -> np.ndarray:
    """Llama's q and k rows as RoPE by halves wants them.

    Converters store the rows of a head as 0, h/2, 1, h/2 + 1, ...: pairs that rotate together lie side by side. Here
    a pair is (i, i + h/2). Each head is put back on its own, so grouped-query attention needs no other rule.
    """
    rows = weight.data.reshape(weight.shape[0], -1)  # [heads * head_dim, bytes of a row]; a bias has rows of one value
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.data.shape)


def read_vocabulary(gguf: GGUF, vocab: int) -> Vocabulary:
    """The token lists, still undecoded in the file. Without any token list: an empty vocabulary."""
    fields = Fields(gguf.path, gguf.metadata, "tokenizer.ggml.")
    fields.refuse("model", ("gpt2",), "other than gpt2 (byte-level BPE) is not implemented")
    tokens, merges = (_strings(fields, key) for key in ("tokens", "merges"))
    if len(tokens) > vocab:
        raise FormatError(f"{gguf.path}: more tokens than rows in token_embd.weight", found=len(tokens), expected=vocab)
    types = fields.get("token_type")
    if types is not None and (not isinstance(types, np.ndarray) or len(types) != len(tokens)):
        raise FormatError(f"{gguf.path}: tokenizer.ggml.token_type", expected=f"{len(tokens)} numbers, one a token")
    pre = fields.text("pre", "")
    return Vocabulary(
        kind="gguf",
        tokens=tokens,
        token_types=types,
        merges=merges,
        pre=pre,
        bos_id=_token_id(fields, "bos"),
        eos_id=_token_id(fields, "eos"),
        add_bos=fields.flag("add_bos_token", pre in ADDS_BOS),
    )


def read_eos_ids(gguf: GGUF, vocabulary: Vocabulary) -> frozenset[int]:
    """The file's eos, eot and eom ids, and every control token whose name ends a turn or a text."""
    fields = Fields(gguf.path, gguf.metadata, "tokenizer.ggml.")
    stated = (_token_id(fields, kind) for kind in ("eos", "eot", "eom"))
    types = () if vocabulary.token_types is None else vocabulary.token_types
    control = np.flatnonzero(np.asarray(types) == CONTROL).tolist()
    named = (i for i in control if vocabulary.tokens[i] in END_TOKENS)
    return frozenset([*(i for i in stated if i is not None), *named])


def read_generation(gguf: GGUF) -> dict[str, Any]:
    """Sampling settings the file carries: the `general.sampling.*` keys, without that prefix."""
    prefix = "general.sampling."
    return {key[len(prefix) :]: value for key, value in gguf.metadata.items() if key.startswith(prefix)}


def _strings(fields: Fields, key: str) -> StringArray | tuple[()]:
    value = fields.get(key)
    if value is not None and not isinstance(value, StringArray):
        raise fields.error(key, type(value).__name__, "an array of strings")
    return value if value is not None else ()


def _token_id(fields: Fields, kind: str) -> int | None:
    value = fields.get(f"{kind}_token_id")
    if value is not None and type(value) is not int:
        raise fields.error(f"{kind}_token_id", value, "a token id")
    return value if value is not None and 0 <= value < 1 << 31 else None  # -1 as u32 stands for "none"
