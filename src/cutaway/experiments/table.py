"""The Program as a table: for a step of given size, each operation's shapes, bytes, work and time.

Nothing is run here: shapes and FLOPs come from the Program, bytes from the weights' formats, times from a profile
if there is one. Read next: `trace.py`, which adds what the tensors held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutaway.forward.program import Attribute, Op, Program
from cutaway.quant import Weight

__all__ = ["OperationRow", "operation_table"]

Profile = Iterable[tuple[Sequence[str], int]]


@dataclass(frozen=True)
class OperationRow:
    """One operation of the Program in one step.

    `weight_bytes` are bytes of weights read (an embedding reads only the rows it looks up), `kv_bytes` bytes of the
    KV cache read and written. `dtype` is the weight's format, or F32 where no weight takes part. `time_ns` is the time
    of the operation, or of the fused group `fused` that it ends; None elsewhere and where nothing was timed.
    `attributes` is what the operation is told beyond its kind.
    """

    name: str
    kind: str
    module: str
    layer: int | None
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    dtype: str
    weight_bytes: int
    kv_bytes: int
    flops: int
    time_ns: int | None = None
    fused: tuple[str, ...] = ()
    attributes: tuple[tuple[str, Attribute], ...] = ()


def operation_table(
    program: Program,
    weights: Mapping[str, Weight],
    *,
    positions: Sequence[int],
    num_outputs: int,
    kv_bytes_per_token: int = 0,
    profile: Profile = (),
) -> list[OperationRow]:
    """The Program's table for one sequence that computes `positions` (consecutive) in one step.

    `kv_bytes_per_token` is what one token takes in the KV cache of all layers together; `profile` names the
    operations timed together and their nanoseconds.
    """
    num_tokens = len(positions)
    times = {tuple(names)[-1]: (tuple(names), int(ns)) for names, ns in profile}
    kv_bytes = kv_bytes_per_token // max(1, program.config.num_layers)

    def input_shapes(op: Op) -> tuple[tuple[int, ...], ...]:
        if not op.inputs:
            return ((num_tokens,),)  # token ids
        return tuple(program[name].shape(num_tokens, num_outputs) for name in op.inputs)

    rows = []
    for op in program:
        names, time_ns = times.get(op.name, ((), None))
        rows.append(
            OperationRow(
                name=op.name,
                kind=op.kind,
                module=op.module,
                layer=op.layer,
                input_shapes=input_shapes(op),
                output_shape=op.shape(num_tokens, num_outputs),
                dtype=weights[op.weights[0]].format if op.weights and op.weights[0] in weights else "F32",
                weight_bytes=_weight_bytes(op, weights, num_tokens),
                kv_bytes=kv_bytes * program.kv_tokens(op, positions),
                flops=program.flops(op, positions, num_outputs),
                attributes=op.attributes,
                time_ns=time_ns,
                fused=names if len(names) > 1 else (),
            )
        )
    return rows


def _weight_bytes(op: Op, weights: Mapping[str, Weight], num_tokens: int) -> int:
    total = 0
    for name in op.weights:
        if name not in weights:
            continue
        weight = weights[name]
        if op.kind == "embed":
            total += num_tokens * (weight.nbytes // weight.shape[0])
        else:
            total += weight.nbytes
    return total
