"""How the next token is chosen: the chain of every step, greedy beside sampled, temperatures, other engines' rules.

Everything is read off the records that the sampling chain writes of itself (`engine/sampling.py`); nothing is
sampled a second way. Computes; prints nothing. Read next: `loops.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.engine.dialects import DIALECTS, check_dialect
from cutaway.engine.sampling import SamplingParams, StepRecord, candidates, draw_token
from cutaway.engine.stages import History
from cutaway.errors import RequestError
from cutaway.experiments.generating import DEFAULT_TOKENS, Generated, generate, prompt_text
from cutaway.experiments.loops import Loop, distinct, find_loop
from cutaway.experiments.passes import prompt_ids, token_texts

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = [
    "Candidate",
    "DialectRow",
    "Dialects",
    "Origin",
    "Sampled",
    "Stage",
    "Step",
    "TemperatureRow",
    "Temperatures",
    "dialects",
    "sample",
    "shown_settings",
    "temperatures",
]

SHOWN = 12  # candidates kept of each stage


@dataclass(frozen=True)
class Candidate:
    """A token that may be drawn, with its probability at that point of the chain."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class Stage:
    """What one stage of the chain left: `removed` candidates that held `removed_mass`, and the best of the others."""

    name: str
    kept: int
    removed: int
    removed_mass: float
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Step:
    """One chosen token. `stages[0]`, "model", is the model's own distribution.

    `draw` is the random number (None: greedy), `interval` the token's own part of the cumulative mass, in which it
    fell. `rank` is 1 for the model's most probable token. Entropies in nats.
    """

    position: int
    token: int
    text: str
    rank: int
    probability_raw: float
    probability_processed: float
    entropy_raw_nats: float
    entropy_processed_nats: float
    draw: float | None
    interval: tuple[float, float]
    greedy_text: str
    greedy_probability: float  # the model's own, of its most probable token
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Origin:
    """A setting, and where its value came from: flag, request, model or default."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Sampled:
    """One continuation, step by step, beside the greedy one. `fork` is the first step where the two differ."""

    model: str
    prompt: str
    settings: Mapping[str, Origin]
    chain: tuple[str, ...]
    seed: int
    text: str
    finish_reason: str
    steps: tuple[Step, ...]
    loop: Loop | None
    greedy_text: str
    greedy_tokens: tuple[str, ...]
    greedy_loop: Loop | None
    fork: int | None


def _steps(llm: LLM, records: Sequence[StepRecord]) -> tuple[Step, ...]:
    ids = sorted({int(i) for r in records for s in r.stages for i in s.ids[:SHOWN]} | {r.token for r in records})
    text = dict(zip(ids, token_texts(llm, ids), strict=True))
    return tuple(_step(record, text) for record in records)


def _step(record: StepRecord, text: Mapping[int, str]) -> Step:
    stages = tuple(_stage(stage, text) for stage in record.stages)
    best = stages[0].candidates[0]
    return Step(
        position=record.position,
        token=record.token,
        text=text[record.token],
        rank=record.rank,
        probability_raw=math.exp(record.logprob_raw),
        probability_processed=math.exp(record.logprob_processed),
        entropy_raw_nats=record.entropy_raw_nats,
        entropy_processed_nats=record.entropy_processed_nats,
        draw=record.draw,
        interval=record.interval,
        greedy_text=best.text,
        greedy_probability=best.probability,
        stages=stages,
    )


def _stage(stage: Any, text: Mapping[int, str]) -> Stage:
    pairs = zip(stage.ids[:SHOWN].tolist(), stage.probabilities[:SHOWN].tolist(), strict=True)
    kept = tuple(Candidate(i, text[i], p) for i, p in pairs)
    return Stage(stage.name, stage.kept, stage.removed, stage.removed_mass, kept)


def sample(
    llm: LLM,
    prompt: str | Sequence[int],
    params: SamplingParams,
    *,
    settings: Mapping[str, Origin] | None = None,
) -> Sampled:
    """Continue `prompt` once by `params`, keeping the record of every step, and once greedily.

    `settings` tells where each value came from; without it all are called "request". The greedy continuation keeps
    the penalties and biases of `params`: only its temperature is 0.
    """
    ids = prompt_ids(llm, prompt)
    drawn = generate(llm, ids, replace(params, n=1), record=True)[0]
    greedy = generate(llm, ids, replace(params, temperature=0.0, seed=None, n=1))[0]
    pairs = zip(drawn.ids, greedy.ids, strict=False)
    fork = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if fork is None and len(drawn.ids) != len(greedy.ids):
        fork = min(len(drawn.ids), len(greedy.ids))
    return Sampled(
        model=llm.name,
        prompt=prompt_text(llm, prompt),
        settings=settings or {name: Origin(value, "request") for name, value in shown_settings(params).items()},
        chain=tuple(name for name, _ in params.chain),
        seed=drawn.seed,
        text=drawn.text,
        finish_reason=drawn.finish_reason,
        steps=_steps(llm, drawn.records),
        loop=find_loop(drawn.ids),
        greedy_text=greedy.text,
        greedy_tokens=tuple(token_texts(llm, greedy.ids)),
        greedy_loop=find_loop(greedy.ids),
        fork=fork,
    )


def shown_settings(params: SamplingParams) -> dict[str, Any]:
    """The settings that decide which token is drawn, by name."""
    names = (
        "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias seed dialect"
    )
    return {name: getattr(params, name) for name in names.split()}


# -- temperatures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TemperatureRow:
    """N continuations at one temperature, and the distribution of the first token there.

    `entropy_nats`, `greedy_probability` (of the model's most probable token, after the chain) and `rank` are means
    over all steps of all continuations; `distinct_1`, `distinct_2` count n-grams over all continuations together.
    """

    temperature: float
    texts: tuple[str, ...]
    different_texts: int
    distinct_1: float | None
    distinct_2: float | None
    entropy_nats: float
    greedy_probability: float
    greedy_share: float  # of the steps that took the most probable token
    rank: float
    loops: int
    first: tuple[Candidate, ...]
    first_entropy_nats: float


@dataclass(frozen=True)
class Temperatures:
    """The same prompt at several temperatures. `first` of every row lists the same tokens, in the same order."""

    model: str
    prompt: str
    seed: int
    continuations: int
    max_tokens: int
    rows: tuple[TemperatureRow, ...]


def temperatures(
    llm: LLM,
    prompt: str | Sequence[int],
    values: Iterable[float],
    params: SamplingParams,
    continuations: int = 5,
) -> Temperatures:
    """Draw `continuations` of `prompt` at each temperature, other settings as in `params`.

    Raises: RequestError for no temperature, or one that is not valid.
    """
    ids = prompt_ids(llm, prompt)
    chosen = list(values)
    if not chosen:
        raise RequestError("no temperature given", expected="such as 0.3,0.7,1.0,1.5", param="temperatures")
    seed = 0 if params.seed is None else params.seed
    logits = np.array(llm.forward(ids)[-1], dtype=np.float32)
    made = [replace(params, temperature=value, seed=seed, n=continuations) for value in chosen]
    firsts = [_one_step(logits, one, ids) for one in made]
    listed: dict[int, None] = {}
    for first in sorted(firsts, key=lambda r: r.entropy_processed_nats):
        listed.update(dict.fromkeys(int(i) for i in first.stages[-1].ids[:SHOWN]))
    shown = list(listed)[:SHOWN]
    rows = [
        _temperature_row(llm, one.temperature, generate(llm, ids, one, record=True), first, shown)
        for one, first in zip(made, firsts, strict=True)
    ]
    return Temperatures(
        model=llm.name,
        prompt=prompt_text(llm, prompt),
        seed=seed,
        continuations=continuations,
        max_tokens=DEFAULT_TOKENS if params.max_tokens is None else params.max_tokens,
        rows=tuple(rows),
    )


def _one_step(logits: np.ndarray, params: SamplingParams, ids: Sequence[int]) -> StepRecord:
    """The record of one draw from a row of logits."""
    row = candidates(logits[None, :], 0)
    drawn = draw_token(row, params, History(ids, []), seed=params.seed or 0, index=0, position=len(ids), record=True)
    assert drawn.record is not None
    return drawn.record


def _temperature_row(
    llm: LLM, temperature: float, made: Sequence[Generated], first: StepRecord, shown: Sequence[int]
) -> TemperatureRow:
    records = [record for one in made for record in one.records]
    last = first.stages[-1]
    found = dict(zip(last.ids.tolist(), last.probabilities.tolist(), strict=True))
    greedy = [_probability_of(record.stages[-1], int(record.stages[0].ids[0])) for record in records]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if len(values) else math.nan

    return TemperatureRow(
        temperature=temperature,
        texts=tuple(one.text for one in made),
        different_texts=len({one.ids for one in made}),
        distinct_1=distinct([one.ids for one in made], 1),
        distinct_2=distinct([one.ids for one in made], 2),
        entropy_nats=mean([record.entropy_processed_nats for record in records]),
        greedy_probability=mean(greedy),
        greedy_share=mean([record.rank == 1 for record in records]),
        rank=mean([record.rank for record in records]),
        loops=sum(find_loop(one.ids) is not None for one in made),
        first=tuple(
            Candidate(i, text, found.get(i, 0.0)) for i, text in zip(shown, token_texts(llm, shown), strict=True)
        ),
        first_entropy_nats=first.entropy_processed_nats,
    )


def _probability_of(stage: Any, token: int) -> float:
    at = np.flatnonzero(stage.ids == token)
    return float(stage.probabilities[at[0]]) if len(at) else 0.0


# -- dialects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DialectRow:
    """The same settings and logits through one engine's rules. `refused` says why that engine would not take them."""

    dialect: str
    chain: tuple[str, ...]
    stages: tuple[Stage, ...]
    kept: int
    entropy_nats: float
    refused: str = ""


@dataclass(frozen=True)
class Dialects:
    """One next-token distribution under the rules of several engines. `tokens` are the columns of a comparison."""

    model: str
    prompt: str
    settings: Mapping[str, Any]
    tokens: tuple[str, ...]
    probabilities: Mapping[str, tuple[float, ...]]  # dialect -> probability of each of `tokens`
    rows: tuple[DialectRow, ...]


def dialects(
    llm: LLM, prompt: str | Sequence[int], params: SamplingParams, names: Iterable[str] | None = None
) -> Dialects:
    """The token after `prompt` by the same settings in each dialect (default: all).

    Raises: RequestError for an unknown dialect.
    """
    ids = prompt_ids(llm, prompt)
    logits = np.array(llm.forward(ids)[-1], dtype=np.float32)
    rows, last, listed = [], {}, {}
    for name in DIALECTS if names is None else names:
        own = replace(params, dialect=name, seed=params.seed or 0)
        try:
            check_dialect(own, llm.config.vocab)
        except RequestError as error:
            rows.append(DialectRow(name, (), (), 0, math.nan, str(error)))
            continue
        record = _one_step(logits, own, ids)
        last[name] = record.stages[-1]
        listed.update(dict.fromkeys(int(i) for i in record.stages[-1].ids[:SHOWN]))
        steps = _steps(llm, [record])[0]
        chain = tuple(stage.name for stage in steps.stages[1:])
        rows.append(DialectRow(name, chain, steps.stages, steps.stages[-1].kept, record.entropy_processed_nats))
    shown = list(listed)[:SHOWN]
    return Dialects(
        model=llm.name,
        prompt=prompt_text(llm, prompt),
        settings=shown_settings(params),
        tokens=tuple(token_texts(llm, shown)),
        probabilities={name: tuple(_probability_of(stage, i) for i in shown) for name, stage in last.items()},
        rows=tuple(rows),
    )
