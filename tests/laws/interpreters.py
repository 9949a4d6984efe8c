"""The interpreters the laws are tried on, and the models they are tried with."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from cutaway.config import ModelConfig
from cutaway.forward.decoder import decoder
from cutaway.forward.program import Program
from cutaway.forward.reference import ReferenceProgram
from cutaway.quant import Weight

# Heads of 32, so that a q8_0 KV cache fits; an odd vocabulary; a row of panels that is not full.
SMALL = replace(tiny.TINY, head_dim=32)
CONFIGS: dict[str, ModelConfig] = {
    "small": SMALL,
    "small-qwen3": replace(tiny.QWEN3, head_dim=32, tied_head=False),
    "small-llama-biases": tiny.VARIANTS["llama-all-biases"],
    "group-7": tiny.VARIANTS["qwen2-group-7"],
    "wide": replace(SMALL, hidden=256, intermediate=512, num_heads=8),  # rows of 256 for the K formats
}


@functools.cache
def model(config: str, format: str) -> tuple[Program, Mapping[str, Weight]]:
    """A tiny model by the name of its config; a catalogue model by the name of its file."""
    if config in CONFIGS:
        program = decoder(CONFIGS[config])
        return program, tiny.random_weights(program, format)
    from cutaway.files.checkpoint import load

    path = Path(os.environ.get("CUTAWAY_HOME", Path.home() / ".cache" / "cutaway")) / "models" / config
    if not path.exists():
        pytest.skip(f"{path} is not there")
    checkpoint = load(path)
    return decoder(checkpoint.config), checkpoint.weights


class TokenByToken:
    """The reference, one token of a batch at a time: it holds every law by construction, so the tests can be tried."""

    def __init__(self, program: Program, weights: Mapping[str, Weight], activations: str) -> None:
        self.reference = ReferenceProgram(program, weights, activations)
        self.vocab = program.config.vocab

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> np.ndarray:
        rows = np.empty((len(batch.output_rows), self.vocab), np.float32)
        for token in range(len(batch.token_ids)):
            sequence = int(np.searchsorted(batch.query_starts, token, side="right")) - 1
            wanted = np.flatnonzero(np.asarray(batch.output_rows) == token)
            one = replace(
                batch,
                token_ids=batch.token_ids[[token]],
                positions=batch.positions[[token]],
                slots=batch.slots[[token]],
                query_starts=np.array([0, 1], np.int32),
                context_lengths=batch.positions[[token]] + 1,
                block_tables=batch.block_tables[[sequence]],
                output_rows=np.array([0] if len(wanted) else [], np.int32),
                head_top_k=None,
            )
            rows[wanted] = self.reference.run(one, kv_cache, taps)
        return rows


@dataclass(frozen=True)
class Case:
    """One interpreter with one model: what a law is tried on."""

    kind: str = "native"  # or "reference"
    config: str = "small"
    format: str = "mixed"
    activations: str = "int8"
    kv_type: str = "f16"
    isa: str = ""  # "": the best this processor has

    def __str__(self) -> str:
        return "-".join(filter(None, (self.kind, self.config, self.format, self.activations, self.kv_type, self.isa)))

    @property
    def program(self) -> Program:
        return model(self.config, self.format)[0]

    @property
    def model_config(self) -> ModelConfig:
        return self.program.config

    def interpreter(self, threads: int | None = None, fuse: bool = True) -> Any:
        """`threads`: None is 2 for the cases of mixed formats and real models, and 1 for the others: quick anywhere."""
        threads = threads or (2 if self.format in ("mixed", "file") else 1)
        program, weights = model(self.config, self.format)
        if self.kind == "reference":
            return TokenByToken(program, weights, self.activations)
        native = pytest.importorskip("cutaway.forward.native", exc_type=ImportError)
        if self.isa and self.isa not in native.isas():
            pytest.skip(f"this processor has no {self.isa}")
        with pytest.MonkeyPatch.context() as patch:
            if self.isa:
                patch.setenv("CUTAWAY_ISA", self.isa)
            max_context = min(1024, program.config.max_context)
            made = native.NativeProgram(
                program, weights, activations=self.activations, threads=threads, max_context=max_context, fuse=fuse
            )
        assert not self.isa or made.isa == self.isa
        return made


FORMATS_OF_32 = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "mixed")
K_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

CASES = [
    Case("reference", format="F32", activations="f32", kv_type="f32"),
    Case("reference", format="Q8_0", activations="int8", kv_type="q8_0"),
    *(Case(format=f, activations=a) for f in FORMATS_OF_32 for a in ("int8", "f32")),
    *(Case(config="wide", format=f, activations=a) for f in K_FORMATS for a in ("int8", "f32")),
    *(Case(kv_type=kv, activations=a) for kv in ("f32", "q8_0") for a in ("int8", "f32")),
    *(Case(config=c, format="Q8_0") for c in ("small-qwen3", "small-llama-biases")),
    Case(config="group-7", format="F32", activations="f32"),
    *(Case(isa=isa, activations=a) for isa in ("scalar", "avx2", "avx512vnni") for a in ("int8", "f32")),
    *(Case(config="wide", format="Q4_K", isa=isa, kv_type="q8_0") for isa in ("scalar", "avx2", "avx512vnni")),
]
REAL_CASES = [
    Case(config="qwen2.5-coder-0.5b.gguf", format="file"),
    Case(config="qwen2.5-coder-0.5b.gguf", format="file", activations="f32", kv_type="q8_0"),
    Case(config="smollm2-135m.gguf", format="file", kv_type="f32"),
]
EVERY_CASE = [
    *(pytest.param(case, id=str(case)) for case in CASES),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in REAL_CASES),
]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the last bit; -0.0 is not 0.0, and a NaN is only the same NaN."""
    assert a.dtype == b.dtype == np.float32
    return a.shape == b.shape and a.tobytes() == b.tobytes()
