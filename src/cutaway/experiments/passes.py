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
    "token_bytes",
    "token_texts",
    "traced_pass",
]


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


def profile_pass(llm: LLM, ids: Sequence[int]) -> list[tuple[tuple[str, ...], int]]:
    """Times of an untapped forward pass: (names of the operations timed together, ns). Empty if there is no clock."""
    profile = getattr(llm.interpreter, "profile", None)
    if profile is None:
        return []
    llm.forward(list(ids))
    return [(tuple(names), int(ns)) for names, ns in profile()]


def token_bytes(llm: LLM, ids: Iterable[int]) -> list[bytes]:
    """The bytes each token stands for; a character may be spread over several tokens."""
    return [llm.tokenizer.token_bytes(int(i)) for i in ids]


def token_texts(llm: LLM, ids: Iterable[int]) -> list[str]:
    r"""Each token as text by itself; bytes that are no whole character are written as `\xe4\xbd`."""
    return [llm.tokenizer.token_text(int(i)) for i in ids]
