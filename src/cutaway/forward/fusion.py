"""Fusion: which operations of a Program run as one phase of kernels, decided by their kinds and order alone.

Operations that follow one another become one phase where that saves a trip through memory or a barrier. A tapped tensor
that such a phase would keep to itself takes that phase apart; every other phase stays fused. Knows no array and no
kernel. Read next: `native.py`, which compiles the phases.
"""

from __future__ import annotations

from collections.abc import Collection

from cutaway.forward.program import Op, Program

__all__ = ["fused"]


def fused(program: Program, tapped: Collection[str]) -> list[list[Op]]:
    """The Program's operations in order, those of one phase together; `tapped` tensors exist between phases."""
    groups: list[list[Op]] = []
    ops = list(program)
    while ops:
        size = next((n for rule in (_projections, _attention, _residual) if (n := rule(ops, tapped))), 1)
        groups.append(ops[:size])
        del ops[:size]
    return groups


def _hidden(ops: list[Op], tapped: Collection[str]) -> bool:
    """True when no tap looks at these tensors."""
    return not any(op.name in tapped for op in ops)


def _projections(ops: list[Op], tapped: Collection[str]) -> int:
    """[rms_norm] + the linears that read one tensor [+ silu_mul of the two]"""
    start = 1 if ops[0].kind == "rms_norm" and _hidden(ops[:1], tapped) else 0
    if start == len(ops) or ops[start].kind != "linear":
        return 0
    source = ops[0].name if start else ops[0].inputs[0]
    end = start
    while end < len(ops) and ops[end].kind == "linear" and ops[end].inputs == (source,):
        end += 1
    if end == start:
        return 0
    pair = ops[start:end]
    if end < len(ops) and ops[end].kind == "silu_mul" and len(pair) == 2 and _hidden(pair, tapped):
        return end + 1
    return end if start or len(pair) > 1 else 0


def _attention(ops: list[Op], tapped: Collection[str]) -> int:
    """[head_norm of q, head_norm of k] + rope of q, rope of k + attention"""
    for kinds in (["rope", "rope", "attention"], ["head_norm", "head_norm", "rope", "rope", "attention"]):
        if [op.kind for op in ops[: len(kinds)]] == kinds and _hidden(ops[: len(kinds) - 1], tapped):
            return len(kinds)
    return 0


def _residual(ops: list[Op], tapped: Collection[str]) -> int:
    """linear + add of its result"""
    fits = len(ops) > 1 and ops[0].kind == "linear" and ops[1].kind == "add" and ops[1].inputs[1] == ops[0].name
    return 2 if fits and _hidden(ops[:1], tapped) else 0
