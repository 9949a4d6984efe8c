"""What the KV cache saves: the same greedy text with the cache on and with every step computed from position 0.

With the cache a step computes one token; without it, all of them, so a text of n tokens costs about n^2 / 2. The
tokens are the same by law 1, and are compared here at every step that was run. Work (FLOPs and bytes) is counted
from the Program, not measured. Read next: `kv_quality.py`.

Q is not cached because it is used once: a token's query meets the keys before it in the step that computes the token,
and no later step asks for it again. Keys and values are asked for by every later token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutaway.engine.sampling import SamplingParams
from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.generating import generate, prompt_text
from cutaway.experiments.passes import prompt_ids
from cutaway.experiments.table import operation_table

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["KVBench", "LengthRow", "Rates", "StepWork", "bench", "check_lengths", "rates", "step_work"]

LENGTHS = (64, 128, 256, 512)
BUDGET_S = 60.0
SAMPLES = 12  # steps measured one by one past the budget


@dataclass(frozen=True)
class Rates:
    """Prefill and decode, apart. Decode counts the intervals after the first token, so the prompt is never in it."""

    prompt_tokens: int
    first_token_s: float
    prefill_tokens_s: float
    decode_tokens: int
    decode_tokens_s: float | None  # None where no second token came


@dataclass(frozen=True)
class StepWork:
    """What one decode step costs at a context length: counted, not measured."""

    context: int
    cached: bool
    num_tokens: int  # computed in the step
    flops: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class LengthRow:
    """Generating `length` tokens with the cache on and off. `off_estimated`: part of its steps were interpolated."""

    length: int
    on_s: float
    off_s: float
    ratio: float
    on_step_s: float  # the last step
    off_step_s: float
    off_estimated: bool


@dataclass(frozen=True)
class KVBench:
    """The same text twice. `off_measured` are the numbers of the steps really run without the cache.

    `same` says that every one of them chose the same token as the run with the cache; `steps_compared` how many.
    """

    model: str
    prompt: str
    prompt_tokens: int
    text: str
    same: bool
    steps_compared: int
    rates: Rates
    rows: tuple[LengthRow, ...]
    on_step_s: tuple[float, ...]
    off_step_s: tuple[float, ...]
    off_measured: tuple[int, ...]
    work: tuple[StepWork, ...]


def rates(prompt_tokens: int, step_s: Sequence[float]) -> Rates:
    """Rates from the time to the first token and the intervals after it, in seconds.

    500 prompt tokens with the first answer token after 2.0 s and nine more 0.1 s apart: 250 and 10 tokens a second.
    """
    rest = sum(step_s[1:])
    return Rates(
        prompt_tokens=prompt_tokens,
        first_token_s=step_s[0],
        prefill_tokens_s=prompt_tokens / step_s[0] if step_s[0] > 0 else 0.0,
        decode_tokens=len(step_s) - 1,
        decode_tokens_s=(len(step_s) - 1) / rest if rest > 0 else None,
    )


def step_work(llm: LLM, context: int, cached: bool) -> StepWork:
    """Work of the step that computes the token at position `context - 1`, with its keys and values kept or not."""
    positions = [context - 1] if cached else list(range(context))
    table = operation_table(
        llm.program,
        llm.checkpoint.weights,
        positions=positions,
        num_outputs=1,
        kv_bytes_per_token=llm.kv_bytes_per_token,
    )
    return StepWork(
        context=context,
        cached=cached,
        num_tokens=len(positions),
        flops=sum(row.flops for row in table),
        weight_bytes=sum(row.weight_bytes for row in table),
        kv_bytes=sum(row.kv_bytes for row in table),
    )


def check_lengths(llm: LLM, ids: Sequence[int], lengths: Sequence[int]) -> None:
    """Raises: RequestError for a length below 2; ContextLengthError where the longest does not fit."""
    if not lengths or min(lengths) < 2:
        raise RequestError("lengths are not valid", found=list(lengths), expected="at least 2", param="lengths")
    if len(ids) + max(lengths) > llm.max_context:
        raise ContextLengthError(
            "prompt and tokens do not fit the context",
            found=f"{len(ids)} + {max(lengths)} tokens",
            expected=f"at most {llm.max_context}",
            param="lengths",
        )


def bench(
    llm: LLM,
    prompt: str | Sequence[int],
    lengths: Sequence[int] = LENGTHS,
    *,
    budget_s: float | None = BUDGET_S,
    progress: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> KVBench:
    """Generate the longest of `lengths` greedily with the cache on and off; shorter lengths are its beginnings.

    The run without the cache stops being measured step by step after `budget_s` seconds; from there on a few steps
    are measured and those between are interpolated, which the rows say. None: all steps are run. End-of-sequence
    tokens are passed over, so that every length is reached. One step before the clock starts warms up.
    Raises: RequestError for a length below 2; ContextLengthError where the longest does not fit.
    """
    ids = prompt_ids(llm, prompt)
    check_lengths(llm, ids, lengths)
    longest = max(lengths)
    progress("warming up")
    generate(llm, ids, _greedy(2), clock=clock)
    progress(f"{longest} tokens with the KV cache")
    on = generate(llm, ids, _greedy(longest), clock=clock)[0]
    progress(f"{longest} tokens without it")
    off = generate(llm, ids, _greedy(longest), kv_cache=False, budget_s=budget_s, clock=clock)[0]
    measured = dict(enumerate(off.step_s))
    same = off.ids == on.ids[: len(off.ids)]
    for step in _samples(len(off.step_s), longest):
        progress(f"step {step + 1} of {longest} without the KV cache")
        one = generate(llm, [*ids, *on.ids[:step]], _greedy(1), kv_cache=False, clock=clock)[0]
        measured[step] = one.step_s[0]
        same = same and one.ids[0] == on.ids[step]
    off_s = _interpolated(measured, longest)
    return KVBench(
        model=llm.name,
        prompt=prompt_text(llm, prompt),
        prompt_tokens=len(ids),
        text=on.text,
        same=same,
        steps_compared=len(measured),
        rates=rates(len(ids), on.step_s),
        rows=tuple(_row(length, on.step_s, off_s, measured) for length in sorted(set(lengths))),
        on_step_s=on.step_s,
        off_step_s=tuple(off_s),
        off_measured=tuple(sorted(measured)),
        work=tuple(
            step_work(llm, len(ids) + length - 1, cached) for length in sorted(set(lengths)) for cached in (True, False)
        ),
    )


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def _samples(done: int, total: int) -> list[int]:
    """Numbers of the steps to measure among `done` to `total - 1`, the last among them."""
    left = total - done
    if left <= 0:
        return []
    count = min(SAMPLES, left)
    return sorted({done + round((i + 1) * left / count) - 1 for i in range(count)})


def _interpolated(measured: dict[int, float], total: int) -> list[float]:
    known = sorted(measured)
    result = []
    for step in range(total):
        if step in measured:
            result.append(measured[step])
            continue
        before = max(k for k in known if k < step)
        after = min(k for k in known if k > step)
        share = (step - before) / (after - before)
        result.append(measured[before] + share * (measured[after] - measured[before]))
    return result


def _row(length: int, on_s: Sequence[float], off_s: Sequence[float], measured: dict[int, float]) -> LengthRow:
    on, off = sum(on_s[:length]), sum(off_s[:length])
    last = slice(max(length - 5, 1), length)  # the median of the last five steps: one step alone is noise
    return LengthRow(
        length=length,
        on_s=on,
        off_s=off,
        ratio=off / on if on > 0 else float("inf"),
        on_step_s=statistics.median(on_s[last]),
        off_step_s=statistics.median(off_s[last]),
        off_estimated=any(step not in measured for step in range(length)),
    )
