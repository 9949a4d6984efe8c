"""The stages of sampling: each takes the candidates for the next token and gives back new ones (NumPy, float64).

A logits processor changes logits; a filter removes candidates and leaves the logits of the rest alone. The order in
which they are applied, and which definition of a filter, is a dialect: read `dialects.py` next.

A stage sees the whole vocabulary or only the k largest logits (`TopLogits`), and gives the same bits for both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Candidates",
    "History",
    "Stage",
    "add_bias",
    "greedy",
    "min_p",
    "penalise_counts",
    "penalise_repetition",
    "pick",
    "temperature",
    "top_k",
    "top_k_with_ties",
    "top_p",
]


@dataclass(frozen=True)
class Candidates:
    """What is left to choose from: `ids` int [kept] and `logits` float64 [kept].

    They stand by falling logit, ties by rising id (`ordered`), or by rising id. The distribution over them is
    p = softmax(x) = weights / total, with weights = exp(x - peak); it is computed when first asked for, once.
    """

    ids: np.ndarray
    logits: np.ndarray
    ordered: bool = False

    @staticmethod
    def of(logits: np.ndarray) -> Candidates:
        """All of the vocabulary, from a row of logits [vocab]."""
        return Candidates(_every_id(len(logits)), logits.astype(np.float64))

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def peak(self) -> float:
        """The largest logit."""
        return float(self.logits[0] if self.ordered else self.logits.max())

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """exp(x - peak), float64 [kept]"""
        shifted = self.logits - self.peak
        return np.exp(shifted, out=shifted)  # in place: at this size a new array costs more than the exponentials

    @functools.cached_property
    def total(self) -> float:
        """sum exp(x - peak)"""
        return float(self.weights.sum())

    @property
    def probabilities(self) -> np.ndarray:
        """softmax(x), float64 [kept]"""
        return self.weights / self.total

    @property
    def entropy_nats(self) -> float:
        """-sum p ln p = ln total + peak - sum p x"""
        x = self.logits if self.logits.min() > -math.inf else np.maximum(self.logits, -1e300)  # p is 0 there
        return math.log(self.total) + self.peak - float(np.einsum("i,i->", self.weights, x)) / self.total

    def keep(self, which: np.ndarray | slice, ordered: bool | None = None) -> Candidates:
        """Those at the places `which`."""
        return Candidates(self.ids[which], self.logits[which], self.ordered if ordered is None else ordered)

    def at_least(self, bound: float) -> Candidates:
        """Those whose logit is at least `bound`."""
        return self.keep(np.flatnonzero(self.logits >= bound))

    def sorted(self) -> Candidates:
        """By falling logit, ties by rising id."""
        if self.ordered:
            return self
        return self.keep(np.argsort(-self.logits, kind="stable"), ordered=True)


class History:
    """The tokens a penalty looks at: the prompt and what has been generated so far (the list itself, as it grows)."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.prompt, self.output = prompt, output

    @functools.cached_property
    def _prompt_ids(self) -> np.ndarray:
        return np.unique(np.asarray(self.prompt, np.int64))

    def distinct(self) -> np.ndarray:
        """Each id of prompt and output once."""
        return np.union1d(self._prompt_ids, np.asarray(self.output, np.int64))

    def output_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the output, and how often each stands there."""
        return np.unique(np.asarray(self.output, np.int64), return_counts=True)

    def last_counts(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the last `window` tokens, prompt and output alike, and how often each stands there."""
        last = [*self.prompt[-window:], *self.output[-window:]][-window:]
        return np.unique(np.asarray(last, np.int64), return_counts=True)


Stage = tuple[str, Callable[[Candidates, History], Candidates]]
"""A named step of a chain."""


# -- logits processors: they see the whole vocabulary, so a candidate's place is its id ---------------------------


def _changed(c: Candidates, at: np.ndarray, values: np.ndarray) -> Candidates:
    logits = c.logits.copy()
    logits[at] = values
    return Candidates(c.ids, logits)


def add_bias(c: Candidates, bias: Mapping[int, float]) -> Candidates:
    """x + bias, for the ids that have one"""
    at = np.fromiter(bias, np.int64, len(bias))
    return _changed(c, at, c.logits[at] + np.fromiter(bias.values(), np.float64, len(bias)))


def penalise_repetition(c: Candidates, seen: np.ndarray, penalty: float) -> Candidates:
    """x / penalty where x > 0, x * penalty where x <= 0, once for each id in `seen`. Source: arXiv:1909.05858."""
    x = c.logits[seen]
    return _changed(c, seen, np.where(x > 0, x / penalty, x * penalty))


def penalise_counts(
    c: Candidates, seen: np.ndarray, counts: np.ndarray, presence: float, frequency: float
) -> Candidates:
    """x - count * frequency - presence, for the ids that have a count"""
    return _changed(c, seen, c.logits[seen] - counts * frequency - presence)


def temperature(c: Candidates, t: float) -> Candidates:
    """(x - max x) / t, for t > 0. The shift leaves the distribution alone and keeps a tiny t from overflowing."""
    logits = c.logits - c.peak
    with np.errstate(over="ignore"):
        logits /= t
    return Candidates(c.ids, logits, c.ordered)


# -- filters ------------------------------------------------------------------------------------------------------


def greedy(c: Candidates) -> Candidates:
    """The largest logit; of equal ones the lowest id."""
    best = 0 if c.ordered else int(c.logits.argmax())
    return c.keep(slice(best, best + 1), ordered=True)


def top_k(c: Candidates, k: int) -> Candidates:
    """Exactly the k largest logits, ties by lowest id."""
    if k >= len(c):
        return c
    if not c.ordered:
        c = c.at_least(_at_most_kth(c.logits, k)).sorted()
    return c.keep(slice(0, k))


def top_k_with_ties(c: Candidates, k: int) -> Candidates:
    """The k largest logits, and every other one equal to the smallest of them."""
    if k >= len(c):
        return c
    return c.at_least(top_k(c, k).logits[-1])


def top_p(c: Candidates, p: float) -> Candidates:
    """From the most probable down, up to and with the first at which the sum of probabilities is >= p."""
    sought = len(c) if c.ordered else 1024
    while True:  # sort no more of the vocabulary than is needed
        best = top_k(c, sought).sorted()
        reached = np.cumsum(np.exp(best.logits - c.peak))
        if reached[-1] >= p * c.total or len(best) == len(c):
            return best.keep(slice(0, int(np.searchsorted(reached, p * c.total, side="left")) + 1))
        sought *= 16


def min_p(c: Candidates, p: float) -> Candidates:
    """Those whose probability is at least p times that of the most probable: x >= max x + ln p, for p > 0."""
    return c.at_least(c.peak + math.log(p))


# -- the draw -----------------------------------------------------------------------------------------------------


def pick(c: Candidates, u: float) -> tuple[int, float]:
    """Place of the first candidate at which the cumulative probability exceeds u, and the probability before it.

    u lies in [0, 1). Two levels: a large vocabulary is summed by chunks, and only one chunk is walked through.
    """
    chunk, target = 1024, u * c.total
    sums = np.cumsum(np.add.reduceat(c.weights, np.arange(0, len(c), chunk)))
    part = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
    start = float(sums[part - 1]) if part else 0.0
    weights = c.weights[part * chunk : (part + 1) * chunk]
    inside = start + np.cumsum(weights)
    place = int(np.searchsorted(inside, target, side="right"))
    if place == len(inside):  # rounding put the target past the end: the last one that can be drawn
        place = int(np.flatnonzero(weights)[-1])
    return part * chunk + place, (float(inside[place - 1]) if place else start) / c.total


def _at_most_kth(x: np.ndarray, k: int) -> float:
    """A bound that at least k values reach, close to the k-th largest: the k-th largest of the maxima of parts."""
    deep = 64
    parts = len(x) // deep
    maxima = x[: parts * deep].reshape(deep, parts).max(axis=0) if k <= parts else x
    return float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])


@functools.lru_cache(maxsize=4)
def _every_id(vocab: int) -> np.ndarray:
    ids = np.arange(vocab, dtype=np.int32)
    ids.flags.writeable = False
    return ids
