"""KVCache: the storage of keys and values, one pair of arrays a layer.

It holds bytes and their layout. It does not know who owns a block (`blocks.py`) nor how attention reads one (the
interpreters in `forward/`). Read next: `blocks.py`.

Layouts, chosen so that a block of one head is contiguous and a kernel reads it with unit stride:

    K  [num_blocks, num_kv_heads, head_dim, block_size]   the same dimension of 8 neighbouring keys is one vector
    V  [num_blocks, num_kv_heads, block_size, head_dim]   a token's value is one row

Token number `t` of a sequence lies in slot `block_table[t // block_size] * block_size + t % block_size`.

q8_0 stores int8 codes in the same layouts, in groups of 32 values along head_dim of one token:

    scale = float16(max|x| / 127)      code = rint(x / scale), 0 where scale is 0      x' = code * scale
"""

from __future__ import annotations

import numpy as np

from cutaway.config import ModelConfig
from cutaway.errors import RequestError

__all__ = ["KV_TYPES", "KVCache"]

GROUP = 32
KV_TYPES = ("f16", "f32", "q8_0")

_DTYPES = {"f16": np.float16, "f32": np.float32, "q8_0": np.int8}


class KVCache:
    """Keys and values of `num_blocks` blocks of `block_size` tokens, for every layer of a model.

    Attributes: `k`, `v` (one array a layer); `k_scale`, `v_scale` (float16, for q8_0; else empty lists).
    Memory is asked for zeroed, so the operating system only backs the blocks that have been written.

    Raises: RequestError for an unknown type, or q8_0 with a head_dim that is no multiple of 32.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, k_type: str = "f16", v_type: str = "f16", block_size: int = 32
    ) -> None:
        for param, kind in (("k_type", k_type), ("v_type", v_type)):
            _check(kind, config.head_dim, param)
        if num_blocks < 1 or block_size < 1:
            raise RequestError("a KV cache needs at least one block of one token", found=f"{num_blocks} x {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.k_type, self.v_type = k_type, v_type
        heads, dim, groups = config.num_kv_heads, config.head_dim, config.head_dim // GROUP
        layers = range(config.num_layers)

        k_shape, v_shape = (num_blocks, heads, dim, block_size), (num_blocks, heads, block_size, dim)
        self.k = [np.zeros(k_shape, _DTYPES[k_type]) for _ in layers]
        self.v = [np.zeros(v_shape, _DTYPES[v_type]) for _ in layers]
        k_shape, v_shape = (num_blocks, heads, groups, block_size), (num_blocks, heads, block_size, groups)
        self.k_scale = [np.zeros(k_shape, np.float16) for _ in layers] if k_type == "q8_0" else []
        self.v_scale = [np.zeros(v_shape, np.float16) for _ in layers] if v_type == "q8_0" else []

    @property
    def nbytes(self) -> int:
        """Bytes allocated: `num_blocks * block_size * bytes_per_token`."""
        return sum(array.nbytes for arrays in (self.k, self.v, self.k_scale, self.v_scale) for array in arrays)

    @staticmethod
    def bytes_per_token(config: ModelConfig, k_type: str = "f16", v_type: str = "f16") -> int:
        """Bytes one token takes: `num_layers * num_kv_heads * head_dim * (bytes of a key value + of a value value)`.

        Qwen2.5-0.5B in float16: 24 * 2 * 64 * (2 + 2) = 12,288.
        """
        per_layer = 0
        for param, kind in (("k_type", k_type), ("v_type", v_type)):
            _check(kind, config.head_dim, param)
            per_layer += config.kv_width * np.dtype(_DTYPES[kind]).itemsize
            if kind == "q8_0":
                per_layer += config.kv_width // GROUP * 2
        return config.num_layers * per_layer


def _check(kind: str, head_dim: int, param: str) -> None:
    if kind not in _DTYPES:
        raise RequestError("unknown KV cache type", found=repr(kind), expected=", ".join(KV_TYPES), param=param)
    if kind == "q8_0" and head_dim % GROUP:
        raise RequestError(
            "q8_0 stores groups of 32 values of a head", found=f"head_dim {head_dim}", hint="f16 or f32", param=param
        )
