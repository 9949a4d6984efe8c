"""Small models for the kernels that only exist inside a Program: attention, the KV cache, the output head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tiny
from steps import Stage

from cutaway.config import ModelConfig
from cutaway.forward.decoder import decoder
from cutaway.forward.native import NativeProgram
from cutaway.forward.taps import Taps

KV_TYPES = ("f16", "f32", "q8_0")


def config(head_dim: int = 32, group: int = 3, num_kv_heads: int = 2, **other: Any) -> ModelConfig:
    """One layer; what matters is its heads."""
    heads = group * num_kv_heads
    fields = {"hidden": 32, "intermediate": 32, "num_layers": 1, "vocab": 61, "max_context": 1024, **other}
    return replace(tiny.TINY, head_dim=head_dim, num_heads=heads, num_kv_heads=num_kv_heads, **fields)


def native(cfg: ModelConfig, isa: str | None = None, threads: int = 2, **options: Any) -> NativeProgram:
    program = decoder(cfg)
    options = {"activations": "f32", "max_context": cfg.max_context, **options}
    return NativeProgram(program, tiny.random_weights(program), isa=isa, threads=threads, **options)


def ids_of(cfg: ModelConfig, count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, cfg.vocab, count)]


def poisoned(stage: Stage) -> Stage:
    """Every value that was never stored is NaN."""
    kv = stage.kv_cache
    for arrays in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        for array in arrays:
            array.fill(-128 if array.dtype == np.int8 else np.nan)
    return stage


def record(stage: Stage, ids: list[int], chunk: int | None = None) -> dict[str, np.ndarray]:
    """Feed one sequence; its queries, keys, values and mixed values, [num_tokens, .] each."""
    names = ["attn.q_rope", "attn.k_rope", "attn.v", "attn.mix"]
    chunk = chunk or len(ids)
    parts = []
    for at in range(0, len(ids), chunk):
        taps = Taps(stage.interpreter.program, record=[f"layers.0.{name}" for name in names])
        stage.feed({"a": ids[at : at + chunk]}, "none", taps=taps)
        parts.append({name: np.array(taps.recording[f"layers.0.{name}"]) for name in names})
    return {name: np.concatenate([part[name] for part in parts]) for name in names}
