"""What a draw can tell of itself: log-probabilities of the chosen token, and how every stage of the chain left things.

A record must cost little beside a step of the model. So what only a record wants of a whole vocabulary is summed in
float32, the candidates it shows are looked for once (`Candidates.best`), and their probabilities are worked out when
they are read. No draw depends on that, and log-probabilities that a request asks for are float64 throughout.
Read next: `sampling.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutaway.engine.stages import Candidates, top_k

__all__ = ["StageRecord", "StepRecord", "TokenLogprobs", "step_record", "token_logprobs"]

SHOWN = 50  # candidates a record keeps after each stage
WIDE = 4096  # from so many on float32 is worth while


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities for one output token, of two distributions, each named.

    raw: softmax of the model's own logits. processed: what the token was drawn from, after the whole chain (at
    temperature 0 the chosen token has probability 1). `rank` is 1 for the raw most probable token.
    """

    token: int
    raw: float
    processed: float
    rank: int
    top_raw: tuple[tuple[int, float], ...] = ()
    top_processed: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StageRecord:
    """The candidates after one stage: how many are left, and the most probable of them (at most 50, `shown`).

    `removed_mass` is the probability, before this stage, of those it removed. `total` is sum exp(x - max x) over all
    that are left. Of a large vocabulary it is right to 2e-6, and with it what follows from it.
    """

    name: str
    kept: int
    removed: int
    removed_mass: float
    shown: Candidates
    total: float

    @property
    def ids(self) -> np.ndarray:
        """int32 [shown]"""
        return self.shown.ids

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """float64 [shown]"""
        return self.shown.weights / self.total


@dataclass(frozen=True)
class StepRecord:
    """How one token was chosen. `stages[0]` is the model's own distribution, under the name "model".

    `draw` is u in [0, 1), None when greedy; the token is the one whose `interval` of the cumulative mass holds it.
    Candidates lie on that line by falling probability once a filter has sorted them, else by id.
    """

    position: int
    token: int
    stages: tuple[StageRecord, ...]
    draw: float | None
    interval: tuple[float, float]
    rank: int  # 1: the model's most probable
    logprob_raw: float
    logprob_processed: float
    entropy_raw_nats: float
    entropy_processed_nats: float


def token_logprobs(raw: Candidates, kept: Candidates, place: int, count: int) -> TokenLogprobs:
    """Of the candidate at `place` of `kept`, and the `count` most probable, from all of the vocabulary (`raw`)."""
    token = int(kept.ids[place])

    def logprobs(c: Candidates, logits: np.ndarray) -> list[float]:
        return (logits - (c.peak + math.log(c.total))).tolist()

    def most_probable(c: Candidates) -> tuple[tuple[int, float], ...]:
        best = _best(c, count)
        return tuple(zip(best.ids.tolist(), logprobs(c, best.logits), strict=True))

    return TokenLogprobs(
        token=token,
        raw=logprobs(raw, raw.logits[token : token + 1])[0],
        processed=logprobs(kept, kept.logits[place : place + 1])[0],
        rank=_rank(raw, token),
        top_raw=most_probable(raw),
        top_processed=most_probable(kept),
    )


def step_record(
    position: int, chain: Sequence[tuple[str, Candidates]], place: int, u: float | None, below: float
) -> StepRecord:
    """Of a draw by `u` that found the candidate at `place`, with the mass `below` it. `chain`: what each stage left."""
    raw, kept = chain[0][1], chain[-1][1]
    token = int(kept.ids[place])
    total_raw, entropy_raw = _sums(raw, entropy=True)
    totals = [total_raw, *(_sums(left)[0] for _, left in chain[1:])]
    stages: list[StageRecord] = []
    for (name, left), total in zip(chain, totals, strict=True):
        stages.append(_stage_record(name, left, total, stages[-1] if stages else None))
    logprob_processed = kept.logit(place) - kept.peak - math.log(kept.total)
    return StepRecord(
        position=position,
        token=token,
        stages=tuple(stages),
        draw=u,
        interval=(below, below + math.exp(logprob_processed)),
        rank=_rank(raw, token),
        logprob_raw=raw.logit(token) - raw.peak - math.log(total_raw),
        logprob_processed=logprob_processed,
        entropy_raw_nats=entropy_raw,
        entropy_processed_nats=kept.entropy_nats,
    )


def _stage_record(name: str, left: Candidates, total: float, before: StageRecord | None) -> StageRecord:
    removed = before.kept - len(left) if before else 0
    best = top_k(left, SHOWN).sorted()
    return StageRecord(
        name=name,
        kept=len(left),
        removed=removed,
        removed_mass=max(0.0, 1 - total / before.total) if before and removed else 0.0,  # a filter leaves the peak
        shown=Candidates(best.ids.copy(), best.given.copy(), True, best.shift, best.divisor),
        total=total,
    )


def _sums(c: Candidates, entropy: bool = False) -> tuple[float, float]:
    """The total and, if asked for, the entropy in nats of the distribution over `c`.

    Many weights that the draw did not need are computed in float32, in half the time: the total is right to 2e-6 of
    itself, the entropy to 1e-5 nats. They are exp(x), not exp(x - peak), where the peak allows it: a pass less.
    """
    with np.errstate(all="ignore"):
        factor = np.float32(1 / c.divisor)
        top = float(np.float32(c.peak * c.divisor + c.shift) * factor)
        if not c.weighed and len(c) >= WIDE and abs(top) < 64:
            x, weights = c.given.astype(np.float32, copy=False), np.empty(len(c), np.float32)
            np.exp(x if factor == 1 else np.multiply(x, factor, out=weights), out=weights)
            total, nats = float(weights.sum()), 0.0
            if entropy:
                weights *= x
                nats = math.log(total) - float(factor) * float(weights.sum()) / total
            if not math.isnan(nats):  # as it is where a logit is -inf
                return max(total * math.exp(-top), 1.0), max(nats, 0.0)
    return c.total, c.entropy_nats if entropy else 0.0


def _best(c: Candidates, count: int) -> Candidates:
    """The `count` most probable, in order."""
    return top_k(c, count).sorted() if count else c.keep(slice(0, 0))


def _rank(raw: Candidates, token: int) -> int:
    best = raw.best.tolist()
    if token in best:
        return best.index(token) + 1
    logits = raw.given  # the whole vocabulary: a candidate's place is its id
    above = np.count_nonzero(logits > logits[token]) + np.count_nonzero(logits[:token] == logits[token])
    return int(above) + 1
