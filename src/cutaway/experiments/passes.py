"""One forward pass of a model, as the experiments use it: ids in, logits of every row and tapped tensors out.

The only file of this room that knows how an `LLM` is asked. Read next: `trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import ContextLengthError, RequestError
from cutaway.forward.taps import Patch, matching

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = [
    "Answer",
    "answer",
    "chat_ids",
    "forced_logits",
    "profile_pass",
    "prompt_ids",
    "rendered_chat",
    "stop_ids",
    "token_bytes",
    "token_texts",
    "traced_pass",
]

_SHORT_PASS = 64  # tokens


def prompt_ids(llm: LLM, prompt: str | Sequence[int], what: str = "prompt") -> list[int]:
    """Token ids of a prompt: text as it is (a BOS token before it where the model's files ask for one), or ids.

    Raises: RequestError if it is empty or holds an id the model does not have, ContextLengthError if it is too long.
    """
    ids = list(llm.tokenize(prompt)) if isinstance(prompt, str) else [int(i) for i in prompt]
    if not ids:
        raise RequestError(f"the {what} is empty", param=what)
    wrong = next((i for i in ids if not 0 <= i < llm.config.vocab), None)
    if wrong is not None:
        raise RequestError("no such token id", found=wrong, expected=f"0 to {llm.config.vocab - 1}", param=what)
    if len(ids) > llm.max_context:
        limit = f"at most {llm.max_context}"
        raise ContextLengthError(f"the {what} does not fit the context", found=f"{len(ids)} tokens", expected=limit)
    return ids


def traced_pass(
    llm: LLM, ids: Sequence[int], record: Iterable[str] = (), patch: Mapping[str, Patch] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A forward pass from position 0 over `ids`: logits of all rows, and the tensors that match `record`.

    Shapes: [num_tokens, vocab], and [num_tokens, width] for each name.
    """
    names = matching(llm.program, record)
    with llm.tap(names, patch=patch or {}) as recording:
        logits = llm.forward(list(ids))
    return logits, {name: recording[name] for name in names}


def forced_logits(llm: LLM, prompt: Sequence[int], forced: Sequence[int]) -> np.ndarray:
    """Logits before each token of `forced`, when it follows `prompt` whatever the model would have said.

    Shapes: [len(forced), vocab].
    """
    logits = llm.forward([*prompt, *forced])
    return logits[len(prompt) - 1 : -1]


@dataclass(frozen=True)
class Answer:
    """What a model said. `ids` include the token it stopped at, which is no part of `text`."""

    text: str
    ids: tuple[int, ...]
    finish_reason: str


def answer(llm: LLM, prompt: Sequence[int], settings: Mapping[str, Any]) -> Answer:
    """Let the model go on after `prompt`; `settings` by the names of SamplingParams, greedy unless they say else."""
    found = llm.generate(list(prompt), **settings)
    stopped = () if found.stop_token is None else (found.stop_token,)
    ids = (*found.token_ids, *stopped)
    return Answer(found.text, ids, str(found.finish_reason))


def rendered_chat(llm: LLM, messages: list[dict[str, str]]) -> str:
    """The text that the model's chat template makes of messages."""
    return llm.chat_prompt(messages)


def chat_ids(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of messages in the model's chat template, ready for its answer."""
    return list(llm.chat_ids(messages))


class _Timed:
    """An interpreter that runs with its clock on, and sums the times of its steps."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.times: dict[tuple[str, ...], float] = {}

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> Any:
        logits = self.interpreter.run(batch, kv_cache, taps, profile=True)
        for names, ns in self.interpreter.times():
            self.times[names] = self.times.get(names, 0.0) + ns
        return logits


def profile_pass(llm: LLM, ids: Sequence[int]) -> list[tuple[tuple[str, ...], int]]:
    """Times of an untapped forward pass: (names of the operations timed together, ns). Empty if there is no clock.

    A short pass is run three times and the fastest is told: the first finds its buffers not yet in memory.
    """
    if not hasattr(llm.interpreter, "times"):
        return []
    runs = [_timed_pass(llm, ids) for _ in range(3 if len(ids) <= _SHORT_PASS else 1)]
    fastest = min(runs, key=lambda times: sum(times.values()))
    return [(names, round(ns)) for names, ns in fastest.items()]


def _timed_pass(llm: LLM, ids: Sequence[int]) -> dict[tuple[str, ...], float]:
    timed = _Timed(llm.interpreter)
    before, llm.engine.interpreter = llm.engine.interpreter, timed
    try:
        llm.forward(list(ids))
    finally:
        llm.engine.interpreter = before
    return timed.times


def stop_ids(llm: LLM) -> frozenset[int]:
    """The tokens that end an answer of this model, whatever its settings."""
    return frozenset(llm.checkpoint.eos_ids | llm.tokenizer.eos_ids)


def token_bytes(llm: LLM, ids: Iterable[int]) -> list[bytes]:
    """The bytes each token stands for; a character may be spread over several tokens."""
    return [llm.tokenizer.token_bytes(int(i)) for i in ids]


def token_texts(llm: LLM, ids: Iterable[int]) -> list[str]:
    r"""Each token as text by itself; bytes that are no whole character are written as `\xe4\xbd`."""
    return [llm.tokenizer.token_text(int(i)) for i in ids]
