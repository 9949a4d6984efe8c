"""An LLM over a tiny random model and the NumPy interpreter, without files and engine: one character is one token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import steps
import tiny

from cutaway.config import ModelConfig
from cutaway.engine.kv_cache import KVCache
from cutaway.forward.decoder import decoder
from cutaway.forward.reference import ReferenceProgram
from cutaway.forward.taps import Recording, Taps

FIRST = 30  # the character of id 0 is chr(30), so ids 2..96 are the printable ASCII characters


class FakeTokenizer:
    def token_bytes(self, token: int) -> bytes:
        return bytes([FIRST + token])

    def token_text(self, token: int) -> str:
        return chr(FIRST + token)


class FakeLLM:
    """What the experiments ask of an LLM, and nothing else."""

    def __init__(
        self, config: ModelConfig = tiny.TINY, *, format: str = "F32", seed: int = 0, name: str = "tiny"
    ) -> None:
        self.name, self.config, self.max_context = name, config, 256
        self.program = decoder(config)
        weights = tiny.random_weights(self.program, format, seed)
        self.checkpoint = SimpleNamespace(weights=weights, add_bos=False, bos_id=None, eos_ids=frozenset({0}))
        self.interpreter = ReferenceProgram(self.program, weights)
        self.tokenizer = FakeTokenizer()
        self.kv_bytes_per_token = KVCache.bytes_per_token(config, "f32", "f32")
        self.forwards: list[int] = []  # tokens of each pass
        self._taps: Taps | None = None

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) - FIRST for character in text]

    def detokenize(self, ids: Iterable[int]) -> str:
        return "".join(chr(FIRST + token) for token in ids)

    def forward(self, ids: Iterable[int]) -> np.ndarray:
        ids = list(ids)
        self.forwards.append(len(ids))
        return steps.Stage(self.interpreter, self.config).logits(ids, taps=self._taps)

    @contextlib.contextmanager
    def tap(self, names: Iterable[str], patch: Mapping[str, Any] | None = None) -> Iterator[Recording]:
        self._taps = Taps(self.program, names, patch)
        try:
            yield self._taps.recording
        finally:
            self._taps = None
