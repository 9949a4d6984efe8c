"""The weights of a model: their names here, in GGUF and in Hugging Face files, and the shapes a config asks for.

One table, read in three directions. The names and shapes are those `forward/decoder.py` writes into its Program (a
test compares them). Opens no file. Read next: `gguf_model.py`, `hf_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cutaway.config import ModelConfig, RopeScaling
from cutaway.errors import FormatError, UnsupportedError
from cutaway.quant import FORMATS, Weight

__all__ = ["ARCHITECTURES", "WeightName", "check_config", "collect", "weight_names", "yarn_context"]

ARCHITECTURES = ("qwen2", "qwen3", "llama")
FLOATS = ("F32", "F16", "BF16")

# ours, GGUF's, Hugging Face's
_LAYER = (
    ("attn_norm", "attn_norm", "input_layernorm"),
    ("attn.q", "attn_q", "self_attn.q_proj"),
    ("attn.k", "attn_k", "self_attn.k_proj"),
    ("attn.v", "attn_v", "self_attn.v_proj"),
    ("attn.q_norm", "attn_q_norm", "self_attn.q_norm"),
    ("attn.k_norm", "attn_k_norm", "self_attn.k_norm"),
    ("attn.o", "attn_output", "self_attn.o_proj"),
    ("mlp_norm", "ffn_norm", "post_attention_layernorm"),
    ("mlp.gate", "ffn_gate", "mlp.gate_proj"),
    ("mlp.up", "ffn_up", "mlp.up_proj"),
    ("mlp.down", "ffn_down", "mlp.down_proj"),
)


@dataclass(frozen=True)
class WeightName:
    """One weight the model needs: its name in each place, and its shape."""

    name: str
    gguf: str
    hf: str
    shape: tuple[int, ...]


def weight_names(config: ModelConfig) -> Iterator[WeightName]:
    """Every weight of the model, in the order of the forward pass."""
    hidden, q, kv = config.hidden, config.q_width, config.kv_width
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn.q": (q, hidden),
        "attn.k": (kv, hidden),
        "attn.v": (kv, hidden),
        "attn.o": (hidden, q),
        "mlp_norm": (hidden,),
        "mlp.gate": (config.intermediate, hidden),
        "mlp.up": (config.intermediate, hidden),
        "mlp.down": (hidden, config.intermediate),
    }
    if config.qk_norm:
        shapes |= {"attn.q_norm": (config.head_dim,), "attn.k_norm": (config.head_dim,)}
    biased = {"attn.q", "attn.k", "attn.v"} if config.qkv_bias else set()
    biased |= {"attn.o"} if config.o_bias else set()
    biased |= {"mlp.gate", "mlp.up", "mlp.down"} if config.mlp_bias else set()

    table = (config.vocab, hidden)
    yield WeightName("embed.weight", "token_embd.weight", "model.embed_tokens.weight", table)
    for i in range(config.num_layers):
        for name, gguf, hf in _LAYER:
            if name not in shapes:
                continue
            has_bias = name in biased
            shape = shapes[name]
            name, gguf, hf = f"layers.{i}.{name}", f"blk.{i}.{gguf}", f"model.layers.{i}.{hf}"
            yield WeightName(f"{name}.weight", f"{gguf}.weight", f"{hf}.weight", shape)
            if has_bias:
                yield WeightName(f"{name}.bias", f"{gguf}.bias", f"{hf}.bias", shape[:1])
    yield WeightName("final_norm.weight", "output_norm.weight", "model.norm.weight", (hidden,))
    if not config.tied_head:
        yield WeightName("head.weight", "output.weight", "lm_head.weight", table)


def collect(
    config: ModelConfig, stored: Mapping[str, Weight], path: Path, *, gguf: bool, harmless: Callable[[str], bool]
) -> dict[str, Weight]:
    """Take the config's weights from a file's, under our names; what is left over must be harmless.

    Raises: FormatError (a weight is missing, or of another shape), UnsupportedError (its format, or a tensor that no
    operation would use: leaving it out would compute another model).
    """
    weights: dict[str, Weight] = {}
    used = set()
    for wanted in weight_names(config):
        name = wanted.gguf if gguf else wanted.hf
        weight = stored.get(name)
        if weight is None:
            raise FormatError(f"{path}: tensor {name} is missing", expected=f"shape {list(wanted.shape)}")
        if weight.shape != wanted.shape:
            raise FormatError(f"{path}: shape of tensor {name}", found=list(weight.shape), expected=list(wanted.shape))
        usable = FORMATS.keys() if len(wanted.shape) == 2 else FLOATS
        if weight.format not in usable:
            raise UnsupportedError(f"{path}: format of tensor {name}", found=weight.format, expected=" ".join(usable))
        weights[wanted.name] = Weight(wanted.name, weight.format, weight.shape, weight.data)
        used.add(name)
    for name in stored:
        if name not in used and not harmless(name):
            raise UnsupportedError(f"{path}: tensor {name} belongs to something that is not implemented")
    return weights


def check_config(path: Path, config: ModelConfig) -> ModelConfig:
    """Rules that hold between the numbers of a config. Gives the config back."""
    if config.num_heads % config.num_kv_heads:
        raise FormatError(
            f"{path}: query heads are no multiple of key/value heads",
            found=f"{config.num_heads} and {config.num_kv_heads}",
        )
    if config.head_dim % 2:
        raise FormatError(f"{path}: head dimension", found=config.head_dim, expected="an even number")
    if config.max_context >= 1 << 31:
        raise FormatError(f"{path}: context", found=config.max_context, expected="fewer than 2**31 tokens")
    scaling = config.rope_scaling
    if config.rope_theta < 1 or (config.rope_theta == 1 and scaling.kind == "yarn"):
        # Below 1 the frequencies grow instead of shrink; yarn divides by the logarithm of the base.
        raise FormatError(f"{path}: rope base", found=f"{config.rope_theta:g}", expected="a number above 1")
    if scaling.kind != "none" and scaling.frequency_factors is None and scaling.factor < 1:
        raise FormatError(f"{path}: rope scaling factor", found=f"{scaling.factor:g}", expected="at least 1")
    return config


def yarn_context(scaling: RopeScaling, max_context: int) -> int:
    """The context a model may use: YaRN stretches the trained one by its factor, whatever the file's limit says."""
    if scaling.kind != "yarn" or scaling.original_max_context is None:
        return max_context
    return max(max_context, int(scaling.original_max_context * scaling.factor))
