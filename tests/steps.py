"""Run an interpreter without an engine: KV cache, block tables and batches for a few sequences by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutaway.config import ModelConfig
from cutaway.forward.program import TopLogits

KV_DTYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "q8_0": np.int8}  # f64: for the float64 yardstick


class KVStore:
    """A KV cache in the agreed layout. Filled with nonsense, so that reading what was never stored shows."""

    def __init__(self, config: ModelConfig, num_blocks: int, k_type: str, v_type: str, block_size: int = 32) -> None:
        self.num_blocks, self.block_size, self.k_type, self.v_type = num_blocks, block_size, k_type, v_type
        heads, head_dim, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
        groups = head_dim // 32
        self.k = [np.full((num_blocks, heads, head_dim, block_size), 99, KV_DTYPES[k_type]) for _ in layers]
        self.v = [np.full((num_blocks, heads, block_size, head_dim), 99, KV_DTYPES[v_type]) for _ in layers]
        self.k_scale = (
            [np.full((num_blocks, heads, groups, block_size), 9, np.float16) for _ in layers]
            if k_type == "q8_0"
            else []
        )
        self.v_scale = (
            [np.full((num_blocks, heads, block_size, groups), 9, np.float16) for _ in layers]
            if v_type == "q8_0"
            else []
        )


@dataclass(frozen=True)
class StepBatch:
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    context_lengths: np.ndarray
    block_tables: np.ndarray
    output_rows: np.ndarray
    head_top_k: int | None = None


@dataclass
class SequenceState:
    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Stage:
    """Sequences under names, fed through one interpreter; blocks are handed out in a shuffled order."""

    def __init__(
        self,
        interpreter: Any,
        config: ModelConfig,
        kv_type: str = "f32",
        *,
        v_type: str | None = None,
        num_blocks: int = 64,
        block_size: int = 32,
        seed: int = 0,
    ) -> None:
        self.interpreter = interpreter
        self.kv_cache = KVStore(config, num_blocks, kv_type, v_type or kv_type, block_size)
        self.free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]
        self.sequences: dict[str, SequenceState] = {}

    def batch(
        self, pieces: Mapping[str, Iterable[int]], outputs: str = "all", head_top_k: int | None = None
    ) -> StepBatch:
        """The next tokens of each named sequence, as one batch. `outputs`: "all", "last" (of each) or "none"."""
        size = self.kv_cache.block_size
        token_ids, positions, slots, starts, lengths, rows = [], [], [], [0], [], []
        for name, piece in pieces.items():
            ids = list(piece)
            state = self.sequences.setdefault(name, SequenceState())
            while len(state.blocks) * size < state.length + len(ids):
                state.blocks.append(self.free.pop())
            for position, token in enumerate(ids, state.length):
                token_ids.append(token)
                positions.append(position)
                slots.append(state.blocks[position // size] * size + position % size)
            state.length += len(ids)
            starts.append(len(token_ids))
            lengths.append(state.length)
            rows.extend({"all": range(starts[-2], starts[-1]), "last": [starts[-1] - 1], "none": []}[outputs])
        tables = np.full((len(pieces), max(len(self.sequences[name].blocks) for name in pieces)), -1, np.int32)
        for row, name in enumerate(pieces):
            blocks = self.sequences[name].blocks
            tables[row, : len(blocks)] = blocks

        def ints(values: list[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        return StepBatch(
            ints(token_ids), ints(positions), ints(slots), ints(starts), ints(lengths), tables, ints(rows), head_top_k
        )

    def feed(
        self, pieces: Mapping[str, Iterable[int]], outputs: str = "all", taps: Any = None
    ) -> dict[str, np.ndarray]:
        """One step; the logits [rows of that sequence, vocab] by name."""
        batch = self.batch(pieces, outputs)
        logits = self.interpreter.run(batch, self.kv_cache, taps)
        assert not isinstance(logits, TopLogits)
        owners = np.searchsorted(batch.query_starts, batch.output_rows, side="right") - 1
        return {name: np.array(logits[owners == index]) for index, name in enumerate(pieces)}

    def logits(self, ids: Iterable[int], chunk: int | None = None, name: str = "a", taps: Any = None) -> np.ndarray:
        """Feed one sequence in chunks; all its logits [num_tokens, vocab]."""
        ids = list(ids)
        chunk = chunk or len(ids)
        parts = [self.feed({name: ids[at : at + chunk]}, taps=taps)[name] for at in range(0, len(ids), chunk)]
        return np.concatenate(parts)

    def share(self, source: str, target: str, num_blocks: int) -> int:
        """Start `target` with the first full blocks of `source`, as a prefix cache does; the tokens it now has."""
        self.sequences[target] = SequenceState(
            self.sequences[source].blocks[:num_blocks], num_blocks * self.kv_cache.block_size
        )
        return self.sequences[target].length

    def release(self, name: str) -> None:
        """Give a sequence's blocks back (to the front of the queue: the next sequence gets others)."""
        self.free[:0] = self.sequences.pop(name).blocks
