"""What the KV cache takes: planned before anything is loaded, equal to what is allocated, to the byte.

Formula: num_layers x num_kv_heads x head_dim x (bytes of a key value + bytes of a value value), for every token;
contexts are rounded up to whole blocks. Needs a config only, no weights. Read next: `kv_bench.py`, what the KV cache
saves; `kv_quality.py`, what a smaller type of it costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutaway.config import ModelConfig
from cutaway.engine.kv_cache import KV_TYPES, KVCache
from cutaway.errors import RequestError
from cutaway.experiments.machine import Memory, memory

__all__ = ["KVPlan", "KVVariant", "formula", "plan", "scratch_estimate"]

BLOCK_SIZE = 32
CHUNK = 512  # prompt tokens of one step
_VALUE = {"f32": "4 B", "f16": "2 B", "q8_0": "(1 + 2/32) B"}  # q8_0: a code, and a float16 scale for each 32


@dataclass(frozen=True)
class KVVariant:
    """The KV cache of the same context, stored or built differently. `ratio` is against the plan itself."""

    name: str
    num_kv_heads: int
    k_type: str
    v_type: str
    bytes_per_token: int
    nbytes: int
    ratio: float
    formula: str


@dataclass(frozen=True)
class KVPlan:
    """Memory of a model at a context length, in bytes, and how long a context would fit.

    `total_bytes` = weights + KV cache + scratch. `fits_tokens` is the longest context whose total is within the
    memory available (None where that is unknown); `variants` compare other types, and other numbers of heads.
    """

    model: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    trained_context: int
    context: int
    allocated_tokens: int  # context, in whole blocks
    block_size: int
    k_type: str
    v_type: str
    formula: str
    bytes_per_token: int
    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    scratch_estimated: bool
    total_bytes: int
    memory: Memory
    fits: bool | None
    fits_tokens: int | None
    variants: tuple[KVVariant, ...]


def formula(config: ModelConfig, k_type: str, v_type: str) -> str:
    """Bytes a token, with the model's numbers put in: `2 x 24 x 2 x 64 x 2 B = 12,288 B`."""
    heads = f"{config.num_layers} x {config.num_kv_heads} x {config.head_dim}"
    total = f"{KVCache.bytes_per_token(config, k_type, v_type):,} B"
    if k_type == v_type:
        return f"2 x {heads} x {_VALUE[k_type]} = {total}"
    return f"{heads} x ({_VALUE[k_type]} + {_VALUE[v_type]}) = {total}"


def scratch_estimate(config: ModelConfig, num_tokens: int = CHUNK) -> int:
    """Bytes of the tensors of one layer that computes `num_tokens` tokens, and one row of logits: on the safe side.

    float32: the residual, its norm and what is added to it; q, k, v and the mixed values; gate, up and their product.
    """
    widths = 3 * config.hidden + 2 * config.q_width + 2 * config.kv_width + 3 * config.intermediate
    return 4 * (num_tokens * widths + config.vocab)


def plan(
    config: ModelConfig,
    weights_bytes: int,
    context: int | None = None,
    k_type: str = "f16",
    v_type: str = "f16",
    scratch_bytes: int | None = None,
    *,
    model: str = "",
    block_size: int = BLOCK_SIZE,
    available: Memory | None = None,
) -> KVPlan:
    """Plan the memory of `context` tokens (default: as many as the model was trained for).

    `scratch_bytes` is what an interpreter has allocated for one step's tensors; None estimates it.
    `KVCache(config, ceil(context / block_size), k_type, v_type).nbytes` is `kv_bytes` exactly.
    Raises: RequestError for a context below 1, an unknown type, or q8_0 with a head_dim it cannot group.
    """
    context = config.max_context if context is None else context
    if context < 1:
        raise RequestError("context is not valid", found=context, expected="at least 1 token", param="context")
    per_token = KVCache.bytes_per_token(config, k_type, v_type)
    tokens = -(-context // block_size) * block_size
    kv_bytes = tokens * per_token
    estimated = scratch_bytes is None
    scratch_bytes = scratch_estimate(config) if scratch_bytes is None else scratch_bytes
    total = weights_bytes + kv_bytes + scratch_bytes
    found = memory() if available is None else available
    fits_tokens = None
    if found.available_bytes is not None:
        room = max(found.available_bytes - weights_bytes - scratch_bytes, 0)
        fits_tokens = room // (per_token * block_size) * block_size
    return KVPlan(
        model=model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        trained_context=config.max_context,
        context=context,
        allocated_tokens=tokens,
        block_size=block_size,
        k_type=k_type,
        v_type=v_type,
        formula=formula(config, k_type, v_type),
        bytes_per_token=per_token,
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        scratch_bytes=scratch_bytes,
        scratch_estimated=estimated,
        total_bytes=total,
        memory=found,
        fits=None if found.available_bytes is None else total <= found.available_bytes,
        fits_tokens=fits_tokens,
        variants=tuple(_variants(config, tokens, k_type, v_type)),
    )


def _variants(config: ModelConfig, tokens: int, k_type: str, v_type: str) -> list[KVVariant]:
    """Other types with the model's own heads, then other numbers of key/value heads with the plan's types."""
    own = KVCache.bytes_per_token(config, k_type, v_type)
    kinds = [
        kind for kind in ("f32", "f16", "q8_0") if kind in KV_TYPES and (kind != "q8_0" or config.head_dim % 32 == 0)
    ]
    shapes: list[tuple[str, ModelConfig, str, str]] = [(kind, config, kind, kind) for kind in kinds]
    if "q8_0" in kinds:
        shapes.append(("K f16, V q8_0", config, "f16", "q8_0"))
    label = k_type if k_type == v_type else f"K {k_type}, V {v_type}"
    shapes.append((f"MHA {label}", replace(config, num_kv_heads=config.num_heads), k_type, v_type))
    shapes.append((f"MQA {label}", replace(config, num_kv_heads=1), k_type, v_type))
    variants = []
    for name, shape, k, v in shapes:
        per_token = KVCache.bytes_per_token(shape, k, v)
        variants.append(
            KVVariant(
                name, shape.num_kv_heads, k, v, per_token, tokens * per_token, per_token / own, formula(shape, k, v)
            )
        )
    return variants
