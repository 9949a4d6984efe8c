"""One answer, streamed: what `run` and `chat` share.

Turns resolved settings into SamplingParams, asks the LLM, hands the text on as it comes, and makes the tables of times
and of settings. Read next: `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutaway.cli.options import Setting

if TYPE_CHECKING:
    from cutaway.engine.sampling import SamplingParams
    from cutaway.llm import LLM, Result

__all__ = ["Answer", "sampling_params", "settings_table", "stats_table", "stream_answer"]


@dataclass(frozen=True)
class Answer:
    """A finished answer, or with `interrupted` one that Ctrl-C ended."""

    result: Result
    interrupted: bool = False


def sampling_params(settings: Mapping[str, Setting]) -> SamplingParams:
    """Raises: RequestError for a value out of range, naming it."""
    from cutaway.engine.sampling import SamplingParams

    return SamplingParams(**{name: setting.value for name, setting in settings.items()})


def stream_answer(
    llm: LLM,
    prompt: str | Sequence[Mapping[str, Any]],
    settings: Mapping[str, Setting],
    write: Callable[[str], None],
) -> Answer:
    """Answer a raw prompt (text) or a conversation (messages); `write` gets the text piece by piece.

    Ctrl-C ends the answer, not the program.
    """
    stream = llm.stream(prompt, sampling_params(settings))
    try:
        for piece in stream:
            write(piece)
    except KeyboardInterrupt:
        stream.cancel()
        return Answer(stream.result, interrupted=True)
    return Answer(stream.result)
