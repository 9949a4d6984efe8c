"""One sequence driven straight through an interpreter: batches laid out beforehand, so that a clock sees nothing else.

What `bench`, `profile` and `tune` have in common: a KV cache of their own (nothing is found in a prefix cache), batches
of one sequence, and the bytes a step must move. Tokens are ids, no text is touched. Read next: `bench.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.config import ModelConfig
from cutaway.engine.kv_cache import KVCache
from cutaway.engine.sequence import Batch
from cutaway.forward.program import Op, Program, TopLogits

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = [
    "TEXT",
    "Lane",
    "Traffic",
    "bandwidth",
    "group_flops",
    "random_ids",
    "text_ids",
    "traffic",
    "weight_sizes",
    "with_threads",
]

TEXT = "The quick brown fox jumps over the lazy dog, and 12 wizards quietly mix 3,457 potions by the river. "

BLOCK_SIZE = 32
HIGH_PLANE = 176 / 272  # of a packed Q8_0 matrix: scales and the high five bits of every weight
LOW_BITS_BYTES = 16  # a row: the norms of its low bits, four float32


class Lane:
    """A KV cache for `tokens` tokens of one sequence, whose blocks lie in order.

    `head_rows`: for each batch of the last `run`, the rows of the output head that screening finished (0: none made).
    """

    def __init__(
        self, config: ModelConfig, interpreter: Any, tokens: int, k_type: str = "f16", v_type: str = "f16"
    ) -> None:
        self.interpreter = interpreter
        self.kv_cache = KVCache(config, max(1, -(-tokens // BLOCK_SIZE)), k_type, v_type, BLOCK_SIZE)
        self.head_rows: list[int] = []

    def batch(self, ids: Sequence[int], start: int, *, output: bool = True, head_top_k: int | None = None) -> Batch:
        """The Batch that computes `ids` at the positions from `start` on; its last row's logits if `output`."""
        end = start + len(ids)
        at = np.arange(start, end, dtype=np.int32)
        return Batch(
            token_ids=np.array(ids, np.int32),
            positions=at,
            slots=at.copy(),
            query_starts=np.array([0, len(ids)], np.int32),
            context_lengths=np.array([end], np.int32),
            block_tables=np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)[None],
            output_rows=np.array([len(ids) - 1] if output else [], np.int32),
            head_top_k=head_top_k if output else None,
        )

    def prefill(
        self, ids: Sequence[int], start: int, chunk: int, *, output: bool = True, head_top_k: int | None = None
    ) -> list[Batch]:
        """Batches of at most `chunk` tokens; only the last one has an output row."""
        last = len(ids) - 1
        return [
            self.batch(ids[i : i + chunk], start + i, output=output and i + chunk > last, head_top_k=head_top_k)
            for i in range(0, len(ids), chunk)
        ]

    def decode(self, ids: Sequence[int], start: int, *, head_top_k: int | None = None) -> list[Batch]:
        """Batches of one token each, every one with an output row."""
        return [self.batch([token], start + i, head_top_k=head_top_k) for i, token in enumerate(ids)]

    def run(self, batches: Iterable[Batch]) -> np.ndarray | TopLogits | None:
        """Compute the batches in turn; the last logits. After top logits the likeliest token is the next one."""
        logits: np.ndarray | TopLogits | None = None
        self.head_rows = []
        for batch in batches:
            if isinstance(logits, TopLogits) and len(batch.token_ids) == 1 and len(logits.ids):
                batch.token_ids[0] = logits.ids[0, 0]
            logits = self.interpreter.run(batch, self.kv_cache)
            self.head_rows.append(getattr(self.interpreter, "head_rows_finished", 0) if batch.head_top_k else 0)
        return logits


def random_ids(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Token ids without a text behind them: what a forward pass costs does not depend on them."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, count)]


def text_ids(llm: LLM, count: int) -> list[int]:
    """Ids of a text of that length: where it matters what comes next, as it does to a screened output head."""
    ids = list(llm.tokenize(TEXT))
    return (ids * (-(-count // len(ids))))[:count]


def with_threads(interpreter: Any, threads: int | None) -> Any:
    """The same interpreter with another number of threads; itself where it has no choice of threads."""
    if threads is None or getattr(interpreter, "threads", None) == threads or not hasattr(interpreter, "with_threads"):
        return interpreter
    return interpreter.with_threads(threads)


def bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory, measured now."""
    from cutaway.forward.native import read_bandwidth

    return read_bandwidth(threads)


@dataclass(frozen=True)
class Traffic:
    """Bytes that operations must move at least once.

    Weights as the interpreter holds them, the KV cache (read up to each token's position, and written), and the
    tensors that go in and come out (float32; those inside a fused group are not among them).
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.activation_bytes + other.activation_bytes,
        )


def weight_sizes(llm: LLM, interpreter: Any = None) -> dict[str, int]:
    """Bytes of each weight as it is read: packed panels where the interpreter has them, else the file's rows."""
    interpreter = interpreter or llm.interpreter
    sizes = {name: weight.nbytes for name, weight in llm.checkpoint.weights.items()}
    packed: Mapping[str, int] = getattr(interpreter, "packed_sizes", {})
    return sizes | dict(packed)


def traffic(
    program: Program,
    names: Sequence[str],
    sizes: Mapping[str, int],
    batch: Batch,
    *,
    kv_bytes_per_token: int,
    head_rows: int = 0,
) -> Traffic:
    """What the operations `names`, done together, move in a step of one sequence.

    `head_rows`: rows of the output head that screening finished (0: it was read as a whole). The screened head reads
    the high plane of every row (176 of 272 bytes of a packed Q8_0 group), the norms of the low bits, and the panels of
    those rows.
    """
    ops = [program[name] for name in names if name in program]
    inside = {op.name for op in ops}
    num_tokens, num_outputs = len(batch.token_ids), len(batch.output_rows)
    weights = kv = values = 0
    for op in ops:
        weights += _weight_bytes(op, program, sizes, num_tokens, head_rows)
        kv += kv_bytes_per_token // max(1, program.config.num_layers) * program.kv_tokens(op, batch.positions)
    for name, reader in {name: op for op in ops for name in op.inputs if name not in inside}.items():
        rows = num_outputs if reader.kind == "select_rows" else None  # of its input it reads the rows it keeps
        values += _values(program[name], num_tokens if rows is None else rows, num_outputs)
    read_inside = {name for op in ops for name in op.inputs}
    for op in ops:
        if op.name not in read_inside:
            values += _values(op, num_tokens, num_outputs)
    return Traffic(weights, kv, 4 * values)


def _values(op: Op, num_tokens: int, num_outputs: int) -> int:
    rows, width = op.shape(num_tokens, num_outputs)
    return rows * width


def _weight_bytes(op: Op, program: Program, sizes: Mapping[str, int], num_tokens: int, head_rows: int) -> int:
    if not op.weights:
        return 0
    rows = program.weight_shapes[op.weights[0]][0]
    total = sum(sizes.get(name, 0) for name in op.weights)
    if op.kind == "embed":
        return total * num_tokens // rows  # only the rows looked up
    if op.name == "logits" and head_rows:
        finished = total * min(head_rows, rows) // rows
        return round(total * HIGH_PLANE) + LOW_BITS_BYTES * rows + finished
    return total


def group_flops(program: Program, names: Sequence[str], batch: Batch) -> int:
    """Floating-point operations of the operations `names` in a step of one sequence."""
    num_outputs = len(batch.output_rows)
    return sum(program.flops(program[name], batch.positions, num_outputs) for name in names if name in program)
