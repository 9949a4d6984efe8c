"""An LLM over a tiny random model and the NumPy interpreter, without files and engine: one character is one token."""

from __future__ import annotations

import contextlib
import re
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
from cutaway.quant import Weight

FIRST = 30  # the character of id 0 is chr(30), so ids 2..96 are the printable ASCII characters


class FakeTokenizer:
    vocab_size = 97
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.control_tokens = {"<end>": 0, "<start>": 1}

    def token_bytes(self, token: int) -> bytes:
        return bytes([FIRST + token])

    def encode(self, text: str) -> list[int]:
        return [ord(character) - FIRST for character in text]

    def token_text(self, token: int) -> str:
        return chr(FIRST + token)


class FakeLLM:
    """What the experiments ask of an LLM, and nothing else."""

    def __init__(
        self,
        config: ModelConfig = tiny.TINY,
        *,
        weights: Mapping[str, Weight] | None = None,
        format: str = "F32",
        seed: int = 0,
        name: str = "tiny",
    ) -> None:
        self.name, self.config, self.max_context = name, config, 256
        self.program = decoder(config)
        weights = weights or tiny.random_weights(self.program, format, seed)
        self.checkpoint = SimpleNamespace(weights=weights, add_bos=False, bos_id=None, eos_ids=frozenset({0}))
        self.interpreter: Any = ReferenceProgram(self.program, weights)
        self.engine = SimpleNamespace(interpreter=self.interpreter)
        self.tokenizer = FakeTokenizer()
        self.kv_bytes_per_token = KVCache.bytes_per_token(config, "f32", "f32")
        self.chat_template: str | None = "a template"
        self.template_end = "<end>"
        self.chunk: int | None = None  # tokens of a step
        self.forwards: list[int] = []  # tokens of each pass
        self._taps: Taps | None = None

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        return "".join(chr(FIRST + token) for token in ids)

    def forward(self, ids: Iterable[int]) -> np.ndarray:
        ids = list(ids)
        self.forwards.append(len(ids))
        return steps.Stage(self.engine.interpreter, self.config).logits(ids, self.chunk, taps=self._taps)

    @contextlib.contextmanager
    def tap(self, names: Iterable[str], patch: Mapping[str, Any] | None = None) -> Iterator[Recording]:
        self._taps = Taps(self.program, names, patch)
        try:
            yield self._taps.recording
        finally:
            self._taps = None

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<start>{m['role'][0]}:{m['content']}{self.template_end}" for m in messages) + "<start>a:"

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(<start>|<end>)", self.chat_prompt(messages)):
            ids += [self.tokenizer.control_tokens[piece]] if piece.startswith("<") else self.tokenize(piece)
        return ids

    def generate(
        self, ids: list[int], *, max_tokens: int, temperature: float = 0.0, **settings: Any
    ) -> SimpleNamespace:
        """Greedy, or with any temperature the second best token."""
        said: list[int] = []
        stop = None
        while len(said) < max_tokens and stop is None:
            token = int(np.argsort(-self.forward([*ids, *said])[-1])[1 if temperature else 0])
            if token in self.checkpoint.eos_ids or token in settings.get("stop_token_ids", ()):
                stop = token
            else:
                said.append(token)
        reason = "length" if stop is None else "stop"
        return SimpleNamespace(text=self.detokenize(said), token_ids=said, finish_reason=reason, stop_token=stop)
