"""The KV cache's storage: predicted bytes are allocated bytes, and the layouts are as written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny

from cutaway.config import ModelConfig
from cutaway.engine.kv_cache import KV_TYPES, KVCache
from cutaway.errors import RequestError

CONFIG = replace(tiny.TINY, head_dim=32, num_kv_heads=2, num_layers=3)
QWEN = ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6)


@pytest.mark.parametrize("k_type", KV_TYPES)
@pytest.mark.parametrize("v_type", KV_TYPES)
@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_predicted_bytes_are_allocated_bytes(k_type, v_type, block_size):
    cache = KVCache(CONFIG, 5, k_type, v_type, block_size)
    assert cache.nbytes == 5 * block_size * KVCache.bytes_per_token(CONFIG, k_type, v_type)


def test_bytes_of_the_default_model():
    found = {kind: KVCache.bytes_per_token(QWEN, kind, kind) for kind in KV_TYPES}
    assert found == {"f16": 12_288, "f32": 24_576, "q8_0": 6_528}
    assert KVCache.bytes_per_token(QWEN) * 32_768 == 384 << 20
    assert KVCache.bytes_per_token(replace(QWEN, num_kv_heads=14)) * 32_768 == 2_688 << 20
    assert KVCache.bytes_per_token(QWEN, "f16", "q8_0") == (12_288 + 6_528) // 2


def test_layouts():
    cache = KVCache(CONFIG, 7, "q8_0", "q8_0", 16)
    assert [array.shape for array in cache.k] == [(7, 2, 32, 16)] * 3
    assert [array.shape for array in cache.v] == [(7, 2, 16, 32)] * 3
    assert [array.shape for array in cache.k_scale] == [(7, 2, 1, 16)] * 3
    assert [array.shape for array in cache.v_scale] == [(7, 2, 16, 1)] * 3
    assert {array.dtype for array in cache.k + cache.v} == {np.dtype(np.int8)}
    assert {array.dtype for array in cache.k_scale + cache.v_scale} == {np.dtype(np.float16)}
    cache = KVCache(CONFIG, 1, "f16", "f32")
    assert (cache.k[0].dtype, cache.v[0].dtype) == (np.float16, np.float32)
    assert (cache.k_scale, cache.v_scale) == ([], [])
    assert all(array.flags.c_contiguous for array in cache.k + cache.v)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [(("f8", "f16"), "k_type"), (("f16", "F16"), "v_type"), (("q8_0", "f16"), "k_type"), (("f16", "q8_0"), "v_type")],
)
def test_refused(arguments, param):
    odd = replace(CONFIG, head_dim=24)
    for make in (lambda: KVCache(odd, 2, *arguments), lambda: KVCache.bytes_per_token(odd, *arguments)):
        with pytest.raises(RequestError) as refused:
            make()
        assert refused.value.param == param
