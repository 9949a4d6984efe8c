"""How many threads: prefill and decode rates of every number from one up, and why the default is what it is.

The numbers of threads are tried in turn, round after round, so that a busy moment of the machine meets them all; a rate
is the median of its rounds. Read next: `lane.py`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.lane import Lane, text_ids, with_threads
from cutaway.experiments.machine import machine

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Cores", "ThreadRow", "ThreadTuning", "cores", "sweep", "threads"]


@dataclass(frozen=True)
class Cores:
    """What limits the number of threads. None where the system does not say.

    `logical`: logical CPUs of the machine; `allowed`: those this process may run on; `physical`: the cores they belong
    to; `quota`: CPUs of time the control group grants; `default`: the least of the last two.
    """

    logical: int
    allowed: int
    physical: int | None
    quota: float | None
    default: int


@dataclass(frozen=True)
class ThreadRow:
    """Rates of one number of threads, tokens a second: medians, and every sample."""

    threads: int
    prefill_tokens_s: float
    decode_tokens_s: float
    prefill_samples: tuple[float, ...]
    decode_samples: tuple[float, ...]


@dataclass(frozen=True)
class ThreadTuning:
    """The sweep. `best_prefill` and `best_decode` are numbers of threads; of equals the smaller."""

    model: str
    processor: str
    prompt: int
    tokens: int
    rounds: int
    cores: Cores
    rows: tuple[ThreadRow, ...]
    best_prefill: int
    best_decode: int


def cores(cpus: Path = Path("/sys/devices/system/cpu"), group: Path = Path("/sys/fs/cgroup")) -> Cores:
    """The processors of this process, and the default number of threads."""
    from cutaway.forward.native import usable_cores

    logical = os.cpu_count() or 1
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(logical))
    return Cores(logical, len(numbers), _physical(cpus, numbers), _quota(group), usable_cores())


def _physical(cpus: Path, numbers: Sequence[int]) -> int | None:
    found = set()
    try:
        for number in numbers:
            place = cpus / f"cpu{number}" / "topology"
            found.add(((place / "physical_package_id").read_text(), (place / "core_id").read_text()))
    except OSError:
        return None
    return len(found)


def _quota(group: Path) -> float | None:
    """CPUs of time a control group may use, or None without a limit."""
    try:
        most, period = (group / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        pass
    try:
        most = (group / "cpu" / "cpu.cfs_quota_us").read_text()
        return int(most) / int((group / "cpu" / "cpu.cfs_period_us").read_text()) if int(most) > 0 else None
    except (OSError, ValueError):
        return None


def sweep(allowed: int, oversubscribe: bool = False) -> list[int]:
    """Numbers of threads to try: 1 to the logical CPUs allowed, past 16 in growing steps; twice as many if asked."""
    most = allowed * 2 if oversubscribe else allowed
    tried = [n for n in range(1, most + 1) if n <= 16 or n % (4 if n <= 64 else 16) == 0]
    return sorted({*tried, allowed, most})


def threads(
    llm: LLM,
    counts: Sequence[int] | None = None,
    *,
    oversubscribe: bool = False,
    prompt: int = 256,
    tokens: int = 32,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda line: None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    found: Cores | None = None,
) -> ThreadTuning:
    """Try numbers of threads (None: see `sweep`): a prompt of `prompt` tokens, then `tokens` decode steps behind it.

    Raises: RequestError for a number below 1; ContextLengthError where the test does not fit.
    """
    found = found or cores()
    counts = sorted(set(sweep(found.allowed, oversubscribe) if counts is None else counts))
    for name, value in (
        ("threads", min(counts, default=0)),
        ("prompt", prompt),
        ("tokens", tokens),
        ("rounds", rounds),
    ):
        if value < 1:
            raise RequestError(name, found=value, expected="at least 1", param=name)
    if prompt + tokens > llm.max_context:
        raise ContextLengthError(
            "the test does not fit the context",
            found=f"{prompt} + {tokens} tokens",
            expected=f"at most {llm.max_context}",
            param="prompt",
        )
    ids = text_ids(llm, prompt + tokens)
    lanes = {}
    for count in counts:
        lanes[count] = Lane(llm.config, with_threads(llm.interpreter, count), prompt + tokens, llm.k_type, llm.v_type)
    prefill: dict[int, list[float]] = {count: [] for count in counts}
    decode: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds + 1):  # the first round warms up
        for count, lane in lanes.items():
            progress(f"{count} threads, {'warming up' if number == 0 else f'round {number} of {rounds}'}")
            first = lane.prefill(ids[:prompt], 0, 512, head_top_k=1)
            rest = lane.decode(ids[prompt:], prompt, head_top_k=1)
            start = clock_ns()
            lane.run(first)
            between = clock_ns()
            lane.run(rest)
            end = clock_ns()
            if number:
                prefill[count].append(1e9 * prompt / max(between - start, 1))
                decode[count].append(1e9 * tokens / max(end - between, 1))
    rows = tuple(
        ThreadRow(n, statistics.median(prefill[n]), statistics.median(decode[n]), tuple(prefill[n]), tuple(decode[n]))
        for n in counts
    )
    return ThreadTuning(
        model=llm.name,
        processor=machine().processor,
        prompt=prompt,
        tokens=tokens,
        rounds=rounds,
        cores=found,
        rows=rows,
        best_prefill=max(rows, key=lambda row: row.prefill_tokens_s).threads,
        best_decode=max(rows, key=lambda row: row.decode_tokens_s).threads,
    )
