"""Engine: the loop. schedule -> forward -> sample -> commit.

Token ids in, token ids out; text is the business of `llm.py`. One thread owns an Engine. Read next: `llm.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from cutaway.config import ModelConfig
from cutaway.engine.blocks import BlockPool
from cutaway.engine.dialects import check_dialect
from cutaway.engine.kv_cache import KVCache
from cutaway.engine.sampling import Drawn, SamplingParams, StepRecord, candidates, draw_token
from cutaway.engine.scheduler import Scheduler
from cutaway.engine.sequence import Batch, FinishReason, Sequence, build_batch
from cutaway.errors import ContextLengthError, RequestError
from cutaway.forward.program import TopLogits
from cutaway.forward.taps import Taps

__all__ = ["Engine", "EngineStats", "Event", "Interpreter"]


class Interpreter(Protocol):
    """What executes a Program (`forward/reference.py`, `forward/native.py`): a Batch and a KVCache to logits."""

    def run(self, batch: Any, kv_cache: Any, taps: Taps | None = None) -> np.ndarray | TopLogits: ...


class Event(NamedTuple):
    """Something a step did to a sequence: a token was drawn, or (token None) it ended in an error."""

    sequence: Sequence
    token: int | None
    record: StepRecord | None


@dataclass
class EngineStats:
    """Sums since the engine was made. A step that computes any prompt token counts as prefill, else as decode."""

    steps: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # found in the prefix cache
    output_tokens: int = 0
    preemptions: int = 0
    schedule_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0


class Engine:
    """Runs sequences through an interpreter until each has a finish reason.

    `max_context` bounds prompt and output together: a prompt of `max_context` tokens or more is refused, and a
    sequence that reaches it ends with "length". `num_blocks` must hold at least one such sequence, which is also the
    default. `clock` gives seconds; tests put in their own.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        config: ModelConfig,
        *,
        max_context: int,
        num_blocks: int | None = None,
        block_size: int = 32,
        k_type: str = "f16",
        v_type: str = "f16",
        eos_ids: Iterable[int] = (),
        chunk: int = 512,
        max_seqs: int = 16,
        prefix_cache: bool = True,
        kv_cache: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 2 <= max_context <= config.max_context:
            raise RequestError(
                "max_context is not one this model has",
                found=max_context,
                expected=f"2 to {config.max_context}",
                param="max_context",
            )
        for param, value in (("chunk", chunk), ("max_seqs", max_seqs), ("block_size", block_size)):
            if value < 1:
                raise RequestError(f"{param} is not valid", found=value, expected="at least 1", param=param)
        least = -(-max_context // block_size)
        num_blocks = least if num_blocks is None else num_blocks
        if num_blocks < least:
            raise RequestError(
                "the KV cache cannot hold one sequence of max_context tokens",
                found=f"{num_blocks} blocks of {block_size}",
                expected=f"at least {least} for {max_context} tokens",
                param="num_blocks",
            )
        self.interpreter, self.config, self.max_context, self.clock = interpreter, config, max_context, clock
        self.kv_cache = KVCache(config, num_blocks, k_type, v_type, block_size)
        self.pool = BlockPool(num_blocks, block_size, prefix_cache and kv_cache)
        self.scheduler = Scheduler(
            self.pool,
            vocab=config.vocab,
            max_context=max_context,
            eos_ids=eos_ids,
            chunk=chunk,
            max_seqs=max_seqs,
            kv_cache=kv_cache,
        )
        self.stats = EngineStats()
        np.empty(24 << 20, np.uint8)  # freeing it teaches glibc to keep arrays of this size for the next step
        self._arrivals = 0

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self, taps: Taps | None = None) -> list[Event]:
        """One pass: plan, compute, draw, commit. Nothing to do gives no events.

        With taps, new sequences compute their whole prompt, so that there is something to record; what a patched
        step computes is never shared. If the forward fails, its sequences end with "error" and their blocks are free
        before the exception goes on.
        """
        started = self.clock()
        batch = self.scheduler.schedule(share=taps is None)
        if batch is None:
            return []
        self._begin(batch, started, taps)
        planned = self.clock()
        try:
            logits = self.interpreter.run(batch, self.kv_cache, taps)
            computed = self.clock()
            drawn = self._sample(logits, batch)
        except Exception as fault:
            for sequence in batch.sequences:
                self._fail(sequence, str(fault))
            raise
        events = self._commit(batch, drawn)
        self._count(batch, started, planned, computed)
        return events

    def _begin(self, batch: Batch, started: float, taps: Taps | None) -> None:
        for sequence in batch.sequences:
            if sequence.started_s is None:
                sequence.started_s = started
                self.stats.cached_tokens += sequence.cached_tokens
            if taps is not None and taps.patched:
                sequence.private = True

    def _sample(self, logits: np.ndarray | TopLogits, batch: Batch) -> list[Drawn | RequestError]:
        drawn: list[Drawn | RequestError] = []
        for row, sequence in enumerate(batch.sampled):
            started = self.clock()
            try:
                token = draw_token(
                    candidates(logits, row),
                    sequence.params,
                    sequence.history,
                    seed=sequence.seed,
                    index=sequence.index,
                    position=len(sequence),
                    record=sequence.record is not None,
                )
                drawn.append(token)
            except RequestError as fault:  # this row only: the others go on
                drawn.append(fault)
            sequence.sample_s += self.clock() - started
        return drawn

    def _commit(self, batch: Batch, drawn: list[Drawn | RequestError]) -> list[Event]:
        events = []
        for sequence, result in zip(batch.sampled, drawn, strict=True):
            if isinstance(result, RequestError):
                self._fail(sequence, str(result))
                events.append(Event(sequence, None, None))
        self.scheduler.commit(batch, [-1 if isinstance(result, RequestError) else result.token for result in drawn])
        now = self.clock()
        for sequence, result in zip(batch.sampled, drawn, strict=True):
            if isinstance(result, RequestError):
                continue
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            sequence.last_token_s = now
            if sequence.logprobs is not None and result.logprobs is not None:
                sequence.logprobs.append(result.logprobs)
            if sequence.record is not None and result.record is not None:
                sequence.record.append(result.record)
            events.append(Event(sequence, result.token, result.record))
        return events

    def _count(self, batch: Batch, started: float, planned: float, computed: float) -> None:
        stats, now = self.stats, self.clock()
        stats.steps += 1
        stats.output_tokens += len(batch.sampled)
        stats.schedule_s += planned - started
        stats.sample_s += now - computed
        stats.preemptions = self.scheduler.preemptions
        decoding = sum(
            end - start == 1 and position >= len(sequence.prompt_ids)
            for sequence, start, end, position in zip(
                batch.sequences,
                batch.query_starts,
                batch.query_starts[1:],
                batch.positions[batch.query_starts[:-1]],
                strict=False,
            )
        )
        stats.prompt_tokens += batch.num_tokens - int(decoding)
        if decoding == batch.num_tokens:
            stats.decode_s += computed - planned
        else:
            stats.prefill_s += computed - planned

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, prompt_ids: Iterable[int], params: SamplingParams, *, record: bool = False) -> list[Sequence]:
        """Accept a request: `params.n` sequences that share the prompt, choice 0 first.

        `record` keeps how each token was chosen. Raises: RequestError naming the field; ContextLengthError.
        """
        ids = self._checked(prompt_ids, self.max_context - 1)
        for param, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            self._check_vocab(param, max(tokens, default=0))
        check_dialect(params, self.config.vocab)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        now = self.clock()
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(self._arrivals, ids, params, index, seed, arrived_s=now)
            sequence.first_choice = sequences[0] if sequences else None
            sequence.logprobs = [] if params.logprobs is not None else None
            sequence.record = [] if record else None
            self._arrivals += 1
            sequences.append(sequence)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence now, with "cancelled". One that has ended is left as it is."""
        if not sequence.finished:
            self.scheduler.finish(sequence, FinishReason.CANCELLED)

    def stop(self, sequence: Sequence) -> None:
        """End a sequence now, with "stop": its owner found a stop string in the text."""
        if not sequence.finished or sequence.finish_reason is FinishReason.LENGTH:
            self.scheduler.finish(sequence, FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def forward(self, ids: Iterable[int], *, last_only: bool = False, taps: Taps | None = None) -> np.ndarray:
        """Logits of a text, float32 [num_tokens, vocab], or [1, vocab] of its last token. Leaves no trace.

        All rows are computed 64 at a time: an interpreter keeps its logits buffer, 0.6 MB a row at 151,936 ids.
        """
        sequence = Sequence(-1, self._checked(ids, self.max_context), SamplingParams())
        needed = -(-len(sequence) // self.pool.block_size)
        if needed > self.pool.num_free:
            raise RequestError(
                "the KV cache is in use", found=f"{self.pool.num_free} free blocks", expected=f"{needed} for this text"
            )
        logits = np.empty((1 if last_only else len(sequence), self.config.vocab), np.float32)
        sequence.blocks = self.pool.allocate(needed)
        try:
            while sequence.remaining:
                take = min(sequence.remaining, self.scheduler.chunk if last_only else min(64, self.scheduler.chunk))
                batch = build_batch([(sequence, take)], self.pool.block_size, all_rows=not last_only)
                rows = self.interpreter.run(batch, self.kv_cache, taps)
                assert isinstance(rows, np.ndarray)
                at = 0 if last_only else sequence.num_computed
                logits[at : at + len(rows)] = rows
                sequence.num_computed += take
        finally:
            self.pool.release(sequence.blocks)
        return logits

    def _fail(self, sequence: Sequence, why: str) -> None:
        if not sequence.finished:
            sequence.error = why
            self.scheduler.finish(sequence, FinishReason.ERROR)

    def _checked(self, prompt_ids: Iterable[int], limit: int) -> tuple[int, ...]:
        ids = np.asarray(prompt_ids if isinstance(prompt_ids, np.ndarray) else list(prompt_ids))
        if ids.size == 0:
            raise RequestError("the prompt is empty", expected="at least one token", param="prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("the prompt is no list of token ids", found=str(ids.dtype), param="prompt")
        if len(ids) > limit:
            raise ContextLengthError(
                "the prompt is too long for the context",
                found=f"{len(ids)} tokens",
                expected=f"at most {limit} with a context of {self.max_context}",
                hint="shorten it or raise max_context",
                param="prompt",
            )
        self._check_vocab("prompt", int(ids.max()))
        self._check_vocab("prompt", int(ids.min()))
        return tuple(ids.tolist())

    def _check_vocab(self, param: str, token: int) -> None:
        if not 0 <= token < self.config.vocab:
            raise RequestError(
                f"{param} names a token outside the vocabulary",
                found=token,
                expected=f"0 to {self.config.vocab - 1}",
                param=param,
            )
