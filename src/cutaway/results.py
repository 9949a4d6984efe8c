"""What an answer is while it comes (Chunk, Answer) and when it is finished (Result, Stats).

Text meets tokens here: an Answer turns one sequence's tokens into pieces of text and watches for stop strings. It
neither computes nor schedules. Read next: `llm.py`, which makes Answers and hands them their tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cutaway.engine.sampling import StepRecord, TokenLogprobs
from cutaway.engine.sequence import Sequence
from cutaway.text.detokenizer import Detokenizer
from cutaway.text.tokenizer import Tokenizer

__all__ = ["Answer", "Chunk", "Result", "Stats"]


class Chunk(str):
    """The text that one token made safe to show: a string (often a word, sometimes empty) that knows its token.

    `token_id` is None for text that only the end set free. `finish_reason` is None but for the last chunk.
    """

    __slots__ = ("finish_reason", "logprobs", "record", "token_id")

    token_id: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None
    record: StepRecord | None

    def __new__(
        cls,
        text: str = "",
        token_id: int | None = None,
        finish_reason: str | None = None,
        logprobs: TokenLogprobs | None = None,
        record: StepRecord | None = None,
    ) -> Chunk:
        chunk = super().__new__(cls, text)
        chunk.token_id, chunk.finish_reason, chunk.logprobs, chunk.record = token_id, finish_reason, logprobs, record
        return chunk

    @property
    def text(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Stats:
    """Where the time of one answer went, and how many tokens it took.

    Rates are tokens a second and None where there is nothing to divide. `prefill_rate` counts the prompt tokens that
    were computed (not the cached ones) from the first step to the first token; `decode_rate` counts the intervals
    between the following ones. Loading and tokenising are in neither. `sample_s` is a part of the two.
    """

    load_s: float
    tokenize_s: float
    prefill_s: float
    decode_s: float
    sample_s: float
    time_to_first_token_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_rate: float | None
    decode_rate: float | None


@dataclass(frozen=True)
class Result:
    """A finished answer.

    `token_ids` are the tokens drawn, without `stop_token`, the one that ended the text where one did (it counts as an
    output token). `finish_reason`: "stop" (an end token or a stop string), "length", "cancelled" or "error".
    `seed` repeats the answer, also where the request gave none. `logprobs` and `record` are there when asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_ids: tuple[int, ...]
    stats: Stats
    seed: int
    index: int = 0
    stop_token: int | None = None
    stop_string: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    record: tuple[StepRecord, ...] | None = None
    error: str | None = None

    def __str__(self) -> str:
        return self.text


class Answer:
    """One sequence and its text so far. `chunks` are the pieces nobody has read yet."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, load_s: float, tokenize_s: float) -> None:
        self.sequence, self._load_s, self._tokenize_s = sequence, load_s, tokenize_s
        self._detokenizer = Detokenizer(tokenizer, sequence.params.stop)
        self._pieces: list[str] = []
        self.chunks: deque[Chunk] = deque()
        self.closed = False
        self.abandoned = False  # nobody holds its stream any more

    def take(self, token: int, record: StepRecord | None = None) -> bool:
        """One more token. True if its text completed a stop string: the sequence should end with "stop"."""
        sequence = self.sequence
        text = "" if token == sequence.stop_token else self._detokenizer.push(token)
        ended = self._detokenizer.stopped
        if sequence.finished and not ended:
            text += self._detokenizer.finish()
        reason = "stop" if ended else str(sequence.finish_reason) if sequence.finished else None
        logprobs = sequence.logprobs[-1] if sequence.logprobs else None
        self._add(Chunk(text, token, reason, logprobs, record))
        self.closed = reason is not None
        return ended

    def close(self) -> None:
        """The sequence ended without a token (cancelled, an error, or nothing was asked for)."""
        if not self.closed:
            self._add(Chunk(self._detokenizer.finish(), None, str(self.sequence.finish_reason)))
            self.closed = True

    def _add(self, chunk: Chunk) -> None:
        self._pieces.append(chunk.text)
        self.chunks.append(chunk)

    def result(self) -> Result:
        sequence = self.sequence
        drawn = len(sequence.output_ids) - (sequence.stop_token is not None)
        return Result(
            text="".join(self._pieces),
            token_ids=tuple(sequence.output_ids[:drawn]),
            finish_reason=str(sequence.finish_reason),
            prompt_ids=sequence.prompt_ids,
            stats=Stats(
                load_s=self._load_s,
                tokenize_s=self._tokenize_s,
                prefill_s=sequence.prefill_s or 0.0,
                decode_s=sequence.decode_s or 0.0,
                sample_s=sequence.sample_s,
                time_to_first_token_s=sequence.time_to_first_token_s,
                prompt_tokens=len(sequence.prompt_ids),
                cached_tokens=sequence.cached_tokens,
                output_tokens=len(sequence.output_ids),
                prefill_rate=sequence.prefill_rate,
                decode_rate=sequence.decode_rate,
            ),
            seed=sequence.seed,
            index=sequence.index,
            stop_token=sequence.stop_token,
            stop_string=self._detokenizer.stop_match,
            logprobs=None if sequence.logprobs is None else tuple(sequence.logprobs[:drawn]),
            record=None if sequence.record is None else tuple(sequence.record),
            error=sequence.error,
        )
