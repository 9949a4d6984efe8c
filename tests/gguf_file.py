"""A GGUF writer for the tests: small, and able to write what no good writer would."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from cutaway.config import ModelConfig
from cutaway.files.weights import weight_names
from cutaway.quant import Weight

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A metadata value with its type: bool, int (u32), float (f32), str, list of those, or bytes as they are."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, bool):
        return struct.pack("<IB", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    kind = value(item[0])[:4] if item else struct.pack("<I", STRING)
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(item)) + b"".join(value(i)[4:] for i in item)


def entry(name: str | bytes, dims: list[int], kind: int, offset: int, n_dims: int | None = None) -> bytes:
    """A row of the tensor table; `dims` in GGUF's order, the contiguous dimension first."""
    count = len(dims) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def header(tensors: int, metadata: int, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, metadata)


def gguf_bytes(
    metadata: Mapping[str, Any], weights: Mapping[str, Weight] | None = None, alignment: int = 32, version: int = 3
) -> bytes:
    """A whole, good file; `weights` are named as they are to be in the file."""
    keys = b"".join(string(key) + value(item) for key, item in metadata.items())
    table, data = b"", b""
    for name, weight in (weights or {}).items():
        table += entry(name, list(weight.shape[::-1]), TYPE_IDS[weight.format], len(data))
        data += weight.data.tobytes()
        data += bytes(-len(data) % alignment)
    head = header(len(weights or {}), len(metadata), version=version) + keys + table
    return head + bytes(-len(head) % alignment) + data


def config_metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys of a config without rope scaling."""
    keys = {
        "context_length": config.max_context,
        "embedding_length": config.hidden,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    return {
        "general.architecture": config.architecture,
        **{f"{config.architecture}.{key}": value for key, value in keys.items()},
    }


def model_bytes(config: ModelConfig, weights: Mapping[str, Weight], **metadata: Any) -> bytes:
    """A model as llama.cpp's converter writes it, llama's q and k rows in pairs; `metadata` with __ for dots."""
    stored: dict[str, Weight] = {}
    for wanted in weight_names(config):
        weight = weights[wanted.name]
        data = weight.data
        if config.architecture == "llama" and (".attn.q." in wanted.name or ".attn.k." in wanted.name):
            rows = data.reshape(weight.shape[0], -1)
            halves = rows.reshape(-1, 2, config.head_dim // 2, rows.shape[1])
            data = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape)
        stored[wanted.gguf] = Weight(wanted.gguf, weight.format, weight.shape, data)
    more = {key.replace("__", "."): item for key, item in metadata.items()}
    return gguf_bytes({**config_metadata(config), **more}, stored)
