"""Interpreters without a model, for tests of the engine: logits that are written down, and a clock set by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tiny

from cutaway.engine.engine import Engine
from cutaway.engine.sequence import Sequence as EngineSequence
from cutaway.forward.program import TopLogits

CONFIG = tiny.TINY


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Script:
    """Emits the given ids whatever the prompt, the last one for ever: logit +20 for it, -20 for the others."""

    def __init__(self, ids: Sequence[int], vocab: int = CONFIG.vocab, before: Callable[[Any], None] | None = None):
        self.ids, self.vocab, self.before = list(ids), vocab, before
        self.steps = 0
        self.batches: list[Any] = []

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> np.ndarray | TopLogits:
        self.steps += 1
        self.batches.append(batch)
        if self.before is not None:
            self.before(batch)
        rows = np.full((len(batch.output_rows), self.vocab), -20, np.float32)
        for row, sequence in zip(rows, batch.sampled, strict=False):
            row[self.ids[min(len(sequence.output_ids), len(self.ids) - 1)]] = 20
        return top(rows, batch.head_top_k)


class Hash:
    """A stand-in for a model: each row's logits depend on every token of its sequence, read back from the KV cache.

    It stores token ids as keys, so a wrong slot, table or length changes what comes out.
    """

    def __init__(self, vocab: int = CONFIG.vocab) -> None:
        self.vocab = vocab

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> np.ndarray | TopLogits:
        store, size = kv_cache.k[0], kv_cache.block_size
        for token, slot in zip(batch.token_ids, batch.slots, strict=True):
            store[slot // size, 0, 0, slot % size] = token
        rows = []
        for output in batch.output_rows:
            s = int(np.searchsorted(batch.query_starts, output, side="right")) - 1
            seen = range(batch.positions[output] + 1)
            ids = [int(store[batch.block_tables[s][t // size], 0, 0, t % size]) for t in seen]
            assert ids[-1] == batch.token_ids[output]
            rows.append(np.random.default_rng(ids).normal(0, 2, self.vocab).astype(np.float32))
        return top(np.array(rows, np.float32).reshape(-1, self.vocab), batch.head_top_k)


def top(rows: np.ndarray, k: int | None) -> np.ndarray | TopLogits:
    if k is None:
        return rows
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int32)
    return TopLogits(ids, np.take_along_axis(rows, ids, axis=1))


def engine_of(interpreter: Any, **settings: Any) -> Engine:
    return Engine(interpreter, CONFIG, **{"max_context": 64, "block_size": 4, **settings})


def finish(engine: Engine, limit: int = 10_000) -> None:
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def check_books(engine: Engine, live: Sequence[EngineSequence] = ()) -> None:
    """Every block is free or held by exactly the live sequences that say so."""
    pool = engine.pool
    holders = [block for sequence in live for block in sequence.blocks]
    assert [holders.count(block) for block in range(pool.num_blocks)] == pool.references
    free = sorted([*pool._empty, *pool._cached])
    assert free == [block for block in range(pool.num_blocks) if pool.references[block] == 0]
    assert len(set(free)) == len(free)
