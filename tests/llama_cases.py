"""Rows of logits and sampling settings, seeded, for comparing the llama.cpp dialect with llama.cpp's own samplers.

`oracle/dump_llama_sampling.py` puts them through llama.cpp and saves what is left; `oracle/test_llama_sampling.py`
puts them through Cutaway. Only NumPy here, so that any Python that has llama_cpp can import it. The numbers come from
NumPy's frozen legacy generator by additions and multiplications alone: they have the same bits on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SAVED = Path(__file__).parent / "oracle" / "data" / "llama_sampling.npz"
SHOWN = 32  # survivors of a case whose probabilities are saved
SIZES = (32, 1000, 3000)  # llama.cpp sorts in another way above 128 survivors, and above 1024 candidates for top-p
KINDS = ("wide", "narrow", "peaked", "flat", "tied", "coarse", "masked", "nearly_masked", "negative")
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's own
OFF = {"temperature": 1.0}
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.3}
HALF = {"temperature": 1.0, "top_p": 0.5}  # of 32 equal logits 16 reach it exactly, in any precision
FIXED = (DEFAULTS, OFF, GREEDY, HALF)


@dataclass(frozen=True)
class Case:
    """One row, float32 [vocab], and the settings by SamplingParams' names; the history is prompt + output."""

    kind: str
    logits: np.ndarray
    prompt: list[int]
    output: list[int]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.logits.tobytes() + repr((self.prompt, self.output, self.settings)).encode())


def row(kind: str, vocab: int, rng: np.random.RandomState) -> np.ndarray:
    x = -6.0 + np.zeros(vocab)
    for _ in range(12):  # the sum of twelve uniform numbers: nearly normal
        x = x + rng.random_sample(vocab)
    if kind == "narrow":
        x = x * 0.01
    elif kind == "peaked":
        x[rng.randint(vocab)] = 60.0
    elif kind == "flat":
        x = np.zeros(vocab)
    elif kind == "tied":
        x = np.rint(x * 2) / 2
    elif kind == "coarse":
        x = np.rint(x) * 8.0
    elif kind == "masked":
        x[rng.random_sample(vocab) < 0.6] = -np.inf
        x[rng.randint(vocab)] = 1.0
    elif kind == "nearly_masked":
        kept = rng.randint(0, vocab, 3)
        x[np.setdiff1d(np.arange(vocab), kept)] = -np.inf
    elif kind == "negative":
        x = x * 3.0 - 40.0
    else:
        x = x * 2.5
    return x.astype(np.float32)


def settings(vocab: int, rng: np.random.RandomState) -> dict[str, Any]:
    def one_of(*values: Any) -> Any:
        return values[rng.randint(len(values))]

    p: dict[str, Any] = {"temperature": one_of(0.0, 0.3, 0.8, 1.0, 1.5)}
    p["top_k"] = one_of(0, 1, 3, 40, 40, 200, vocab, vocab + 7)
    p["top_p"] = one_of(0.0, 0.3, 0.5, 0.9, 0.95, 1.0, 1.0)
    p["min_p"] = one_of(0.0, 0.0, 0.05, 0.3, 1.0)
    p["repetition_penalty"] = one_of(1.0, 1.0, 1.1, 1.8, 0.7)
    p["frequency_penalty"] = one_of(0.0, 0.0, 0.25, 1.5, -0.5)
    p["presence_penalty"] = one_of(0.0, 0.0, 0.5, 2.0, -1.0)
    if rng.randint(4) == 0:
        p["logit_bias"] = {int(i): one_of(-100.0, -1.5, 2.5, 8.0) for i in rng.randint(0, vocab, 3)}
    return p


def cases() -> Iterator[Case]:
    """Every kind of row in every size, with each of FIXED and with settings by chance."""
    rng = np.random.RandomState(20)
    for _ in range(2):
        for vocab in SIZES:
            for kind in KINDS:
                for turn in range(11):
                    p = dict(FIXED[turn]) if turn < len(FIXED) else settings(vocab, rng)
                    # few distinct ids, so that they repeat; sometimes longer than the window of 64
                    ids = rng.randint(0, min(vocab, 40), rng.randint(0, 110)).tolist()
                    cut = rng.randint(len(ids) + 1)
                    yield Case(kind, row(kind, vocab, rng), ids[:cut], ids[cut:], p)
