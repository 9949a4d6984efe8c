"""Where the time of a step goes: every operation's time beside the bytes it must move and the roof over them.

One prefill step and the decode step after it are run several times with the interpreter's clock on; a row is one
operation, or the operations fused into one phase, and its time the median. The roof is the read bandwidth measured at
the same number of threads before and after. Bytes are the least that must move (weights once, the KV cache up to each
token, tensors in and out), so a share of the roof never counts a byte read twice. Read next: `lane.py`.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutaway.engine.kv_cache import KVCache
from cutaway.engine.sequence import Batch
from cutaway.errors import ContextLengthError, RequestError, UnsupportedError
from cutaway.experiments.lane import Lane, Traffic, bandwidth, group_flops, text_ids, traffic, weight_sizes
from cutaway.experiments.machine import machine

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["OperationProfile", "PhaseProfile", "Profile", "kind_of", "profile"]

TOP_LOGITS = "top_logits"  # the interpreter's own phase behind the head; no operation of the Program


@dataclass(frozen=True)
class OperationProfile:
    """One operation or fused group in one step, or (in `kinds`) all of a kind together: `count` of them.

    `share` is of the step's time; `bandwidth_share` is bytes / time / measured bandwidth.
    """

    name: str
    ops: tuple[str, ...]
    layer: int | None
    count: int
    ns: float
    share: float
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    nbytes: int
    bytes_s: float
    bandwidth_share: float
    flops: int
    flops_s: float


@dataclass(frozen=True)
class PhaseProfile:
    """One step, "prefill" or "decode". `total` sums its operations; `wall_ns` is the call as seen from outside.

    `head_rows_finished`: output rows that screening finished, 0 where the head was computed as a whole.
    """

    phase: str
    num_tokens: int
    depth: int
    repeats: int
    wall_ns: float
    tokens_s: float
    head_rows_finished: int
    total: OperationProfile
    kinds: tuple[OperationProfile, ...]  # by falling time
    operations: tuple[OperationProfile, ...]  # in order of execution


@dataclass(frozen=True)
class Profile:
    """Both steps, and the measured bandwidth in bytes a second; the better of the two is the roof."""

    model: str
    processor: str
    threads: int
    isa: str
    activations: str
    k_type: str
    v_type: str
    head_top_k: int | None
    bandwidth_before: float
    bandwidth_after: float
    bandwidth: float
    phases: tuple[PhaseProfile, ...]


def kind_of(names: Sequence[str]) -> str:
    """What a phase is called whatever its layer: `attn_norm + attn.q/k/v`."""
    parts: list[list[str]] = []
    for name in names:
        short = re.sub(r"^layers\.\d+\.", "", name)
        room, dot, rest = short.partition(".")
        if dot and parts and parts[-1][0].startswith(room + "."):
            parts[-1].append(rest)
        else:
            parts.append([short])
    return " + ".join("/".join(part) for part in parts)


def profile(
    llm: LLM,
    *,
    prompt: int = 512,
    depth: int = 0,
    repeats: int = 5,
    head_top_k: int | None = 1,
    progress: Callable[[str], None] = lambda line: None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    bandwidth_of: Callable[[int], float] = bandwidth,
) -> Profile:
    """Profile a prefill step of `prompt` tokens behind `depth` others, and the decode step that follows it.

    `head_top_k`: 1 is a greedy request's step; None computes all logits. A run of each step before warms up. Decode is
    repeated four times as often as prefill.

    Raises: RequestError for a number that makes no sense; ContextLengthError where the steps do not fit;
    UnsupportedError for an interpreter without a clock.
    """
    if not hasattr(llm.interpreter, "times"):
        raise UnsupportedError("this interpreter keeps no times", hint="--interpreter native")
    for name, value, least in (("prompt", prompt, 1), ("depth", depth, 0), ("repeats", repeats, 1)):
        if value < least:
            raise RequestError(name, found=value, expected=f"at least {least}", param=name)
    if depth + prompt + 1 > llm.max_context:
        raise ContextLengthError(
            "the step does not fit the context",
            found=f"{depth} + {prompt} + 1 tokens",
            expected=f"at most {llm.max_context}",
            param="depth",
        )
    interpreter: Any = llm.interpreter
    threads = int(interpreter.threads)
    lane = Lane(llm.config, interpreter, depth + prompt + 1, llm.k_type, llm.v_type)
    ids = text_ids(llm, depth + prompt + 1)
    if depth:
        progress(f"the {depth} tokens before")
        lane.run(lane.prefill(ids[:depth], 0, 512, output=False))
    progress("memory bandwidth")
    before = bandwidth_of(threads)
    steps = [
        ("prefill", lane.batch(ids[depth:-1], depth, head_top_k=head_top_k), repeats),
        ("decode", lane.batch(ids[-1:], depth + prompt, head_top_k=head_top_k), 4 * repeats),
    ]
    measured = []
    for name, batch, count in steps:
        progress(f"{name}, {count} times")
        measured.append((name, batch, count, *_measure(lane, batch, count, clock_ns)))
    after = bandwidth_of(threads)
    roof = max(before, after)
    return Profile(
        model=llm.name,
        processor=machine().processor,
        threads=threads,
        isa=str(getattr(interpreter, "isa", "")),
        activations=str(getattr(interpreter, "activations", "")),
        k_type=llm.k_type,
        v_type=llm.v_type,
        head_top_k=head_top_k,
        bandwidth_before=before,
        bandwidth_after=after,
        bandwidth=roof,
        phases=tuple(_phase(llm, *each, roof=roof) for each in measured),
    )


Times = list[tuple[tuple[str, ...], float]]


def _measure(lane: Lane, batch: Batch, count: int, clock_ns: Callable[[], int]) -> tuple[float, Times, int]:
    """Medians over `count` runs after one more: nanoseconds of the call, of each phase; head rows finished."""
    interpreter = lane.interpreter
    interpreter.run(batch, lane.kv_cache, None, profile=True)
    walls, runs, finished = [], [], []
    for _ in range(count):
        start = clock_ns()
        interpreter.run(batch, lane.kv_cache, None, profile=True)
        walls.append(clock_ns() - start)
        runs.append([(names, ns) for names, ns in interpreter.times() if batch.head_top_k or TOP_LOGITS not in names])
        finished.append(int(getattr(interpreter, "head_rows_finished", 0)) if batch.head_top_k else 0)
    medians = [(names, statistics.median(run[place][1] for run in runs)) for place, (names, _) in enumerate(runs[0])]
    return statistics.median(walls), medians, statistics.median_low(finished)


def _phase(
    llm: LLM,
    phase: str,
    batch: Batch,
    repeats: int,
    wall_ns: float,
    times: Times,
    finished: int,
    *,
    roof: float,
) -> PhaseProfile:
    sizes = weight_sizes(llm)
    per_token = KVCache.bytes_per_token(llm.config, llm.k_type, llm.v_type)
    total_ns = sum(ns for _, ns in times)
    operations = []
    for names, ns in times:
        moved = traffic(llm.program, names, sizes, batch, kv_bytes_per_token=per_token, head_rows=finished)
        layers = {llm.program[name].layer for name in names if name in llm.program}
        layer = layers.pop() if len(layers) == 1 else None
        work = group_flops(llm.program, names, batch)
        operations.append(_measured(kind_of(names), names, layer, 1, ns, total_ns, moved, work, roof))
    kinds: dict[str, list[OperationProfile]] = {}
    for operation in operations:
        kinds.setdefault(operation.name, []).append(operation)
    summed = [_sum(name, members, total_ns, roof) for name, members in kinds.items()]
    return PhaseProfile(
        phase=phase,
        num_tokens=len(batch.token_ids),
        depth=int(batch.positions[0]),
        repeats=repeats,
        wall_ns=wall_ns,
        tokens_s=1e9 * len(batch.token_ids) / wall_ns if wall_ns > 0 else 0.0,
        head_rows_finished=finished,
        total=_sum("total", operations, total_ns, roof),
        kinds=tuple(sorted(summed, key=lambda kind: -kind.ns)),
        operations=tuple(operations),
    )


def _sum(name: str, members: Sequence[OperationProfile], total_ns: float, roof: float) -> OperationProfile:
    moved = Traffic(
        sum(m.weight_bytes for m in members), sum(m.kv_bytes for m in members), sum(m.activation_bytes for m in members)
    )
    ns, work = sum(m.ns for m in members), sum(m.flops for m in members)
    return _measured(name, (), None, len(members), ns, total_ns, moved, work, roof)


def _measured(
    name: str,
    ops: tuple[str, ...],
    layer: int | None,
    count: int,
    ns: float,
    total_ns: float,
    moved: Traffic,
    flops: int,
    roof: float,
) -> OperationProfile:
    bytes_s = 1e9 * moved.nbytes / ns if ns > 0 else 0.0
    return OperationProfile(
        name=name,
        ops=ops,
        layer=layer,
        count=count,
        ns=ns,
        share=ns / total_ns if total_ns > 0 else 0.0,
        weight_bytes=moved.weight_bytes,
        kv_bytes=moved.kv_bytes,
        activation_bytes=moved.activation_bytes,
        nbytes=moved.nbytes,
        bytes_s=bytes_s,
        bandwidth_share=bytes_s / roof if roof > 0 else 0.0,
        flops=flops,
        flops_s=1e9 * flops / ns if ns > 0 else 0.0,
    )
