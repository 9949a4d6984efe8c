"""Sequence: one request's tokens and state. Batch: the frozen plan of one forward.

A Batch is the only thing that crosses from planning to computing. Neither knows text, files or kernels.
Read next: `blocks.py`, then `scheduler.py`, which makes Batches out of Sequences.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np

from cutaway.engine.sampling import SamplingParams, StepRecord, TokenLogprobs
from cutaway.engine.stages import History

__all__ = ["Batch", "FinishReason", "Phase", "Sequence", "build_batch"]


class Phase(enum.Enum):
    """Where a sequence stands. Stored, never guessed from counts."""

    WAITING = "waiting"  # holds no block: new, or preempted
    PREFILL = "prefill"  # holds blocks for all its tokens; some are still to be computed
    DECODE = "decode"  # everything but its newest token is in the KV cache
    FINISHED = "finished"  # holds no block; `finish_reason` says why


class FinishReason(str, enum.Enum):
    """Why a sequence ended. The first two are the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(eq=False)
class Sequence:
    """One request's tokens and state, from `Engine.add` until its finish reason.

    `index` is the number of the choice among the `params.n` that share a prompt; `seed` the one its draws are keyed
    with, also when the request gave none. Times are readings of the engine's clock, in seconds.
    """

    number: int  # order of arrival: older sequences go first
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    index: int = 0
    seed: int = 0
    output_ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, when one did: it is no part of the text
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one an output token, when params.logprobs asks
    record: list[StepRecord] | None = None  # one StepRecord an output token, when the caller asks

    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the KV cache
    digests: list[bytes] = field(default_factory=list)  # of the full blocks, chained
    cached_tokens: int = 0  # prompt tokens that the prefix cache spared at first
    num_published: int = 0  # of its full blocks, those that the prefix cache knows
    private: bool = False  # its keys and values depend on more than its tokens (a patched run): never shared
    preemptions: int = 0
    first_choice: Sequence | None = None  # for index > 0: the choice whose prompt it waits for and shares

    arrived_s: float = 0.0
    started_s: float | None = None  # its first step began
    first_token_s: float | None = None
    last_token_s: float | None = None
    sample_s: float = 0.0

    def __len__(self) -> int:
        """Context length: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens, prompt then output."""
        return [*self.prompt_ids, *self.output_ids]

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next one can be drawn."""
        return len(self) - self.num_computed

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @functools.cached_property
    def history(self) -> History:
        """What penalties look at."""
        return History(self.prompt_ids, self.output_ids)

    @property
    def head_top_k(self) -> int | None:
        """How many of the largest logits it needs; None: all."""
        return None if self.record is not None else self.params.head_top_k

    # -- times, each None until there is one -----------------------------------------------------------------------

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def prefill_s(self) -> float | None:
        """From its first step to its first token, waiting in the queue left out."""
        if self.first_token_s is None or self.started_s is None:
            return None
        return self.first_token_s - self.started_s

    @property
    def decode_s(self) -> float | None:
        """From its first token to its last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return self.last_token_s - self.first_token_s

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed (the cached ones are not) a second of prefill."""
        return (len(self.prompt_ids) - self.cached_tokens) / self.prefill_s if self.prefill_s else None

    @property
    def decode_rate(self) -> float | None:
        """Intervals between output tokens a second: the first token belongs to prefill."""
        return (len(self.output_ids) - 1) / self.decode_s if self.decode_s else None

    def slice(self, start: int, stop: int) -> Ids[int]:
        """Tokens at positions `start` to `stop`, without building the whole list."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : stop - split]
        if stop <= split:
            return self.prompt_ids[start:stop]
        return [*self.prompt_ids[start:], *self.output_ids[: stop - split]]


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's tokens as flat arrays (see `forward/program.py`), and the sequences they belong to.

    `sequences[s]` owns tokens `query_starts[s]:query_starts[s + 1]`; `sampled[r]` draws from output row `r`.
    """

    token_ids: np.ndarray  # int32 [num_tokens]
    positions: np.ndarray  # int32 [num_tokens]
    slots: np.ndarray  # int32 [num_tokens]
    query_starts: np.ndarray  # int32 [num_seqs + 1]
    context_lengths: np.ndarray  # int32 [num_seqs]
    block_tables: np.ndarray  # int32 [num_seqs, max_blocks], -1 past a sequence's last block
    output_rows: np.ndarray  # int32 [num_outputs]
    head_top_k: int | None = None
    sequences: tuple[Sequence, ...] = ()
    sampled: tuple[Sequence, ...] = ()
    params: tuple[SamplingParams, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(
    work: Ids[tuple[Sequence, int]], block_size: int, *, all_rows: bool = False, head_top_k: int | None = None
) -> Batch:
    """The Batch that computes the next `take` tokens of each `(sequence, take)`.

    Output rows are the last token of each sequence whose tokens this step completes, or every token (`all_rows`).
    """
    tokens: list[int] = []
    positions, slots, tables, lengths, starts = [], [], [], [], [0]
    rows: list[int] = []
    sampled: list[Sequence] = []
    for sequence, take in work:
        first, end = sequence.num_computed, sequence.num_computed + take
        tokens.extend(sequence.slice(first, end))
        at = np.arange(first, end, dtype=np.int32)
        table = np.array(sequence.blocks, np.int32)
        positions.append(at)
        slots.append(table[at // block_size] * block_size + at % block_size)
        tables.append(table)
        lengths.append(end)
        starts.append(len(tokens))
        if end == len(sequence) and not all_rows:
            rows.append(len(tokens) - 1)
            sampled.append(sequence)
    block_tables = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    return Batch(
        token_ids=np.array(tokens, np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        query_starts=np.array(starts, np.int32),
        context_lengths=np.array(lengths, np.int32),
        block_tables=block_tables,
        output_rows=np.arange(len(tokens), dtype=np.int32) if all_rows else np.array(rows, np.int32),
        head_top_k=head_top_k,
        sequences=tuple(sequence for sequence, _ in work),
        sampled=tuple(sampled),
        params=tuple(sequence.params for sequence in sampled),
    )
