"""The stages of sampling: each takes the candidates for the next token and gives back new ones (NumPy, float64).

A logits processor changes logits; a filter removes candidates and leaves the logits of the rest alone. The order in
which they are applied, and which definition of a filter, is a dialect: read `dialects.py` next.

A stage sees the whole vocabulary or only the k largest logits (`TopLogits`), and gives the same bits for both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

BEST = 64  # of so many the order is looked for at once


@dataclass(frozen=True)
class Candidates:
    """What is left to choose from: `ids` int [kept], and a logit x for each, `logits` float64 [kept].

    They stand by falling logit, ties by rising id (`ordered`), or by rising id. The distribution over them is
    p = softmax(x) = weights / total, with weights = exp(x - peak).

    All of it is computed when first asked for, and then kept. So is a temperature: x = (given - shift) / divisor, where
    `given` are float32, as the model gave them, or float64, as a processor left them. The order of `given` is that of
    x, so that a filter can choose before anything is divided.
    """

    ids: np.ndarray
    given: np.ndarray
    ordered: bool = False
    shift: float = 0.0
    divisor: float = 1.0
    undivided: Candidates | None = None  # the same ones without the temperature

    @staticmethod
    def of(logits: np.ndarray) -> Candidates:
        """All of the vocabulary, from a row of logits [vocab]."""
        return Candidates(_every_id(len(logits)), logits if logits.dtype == np.float32 else logits.astype(np.float64))

    def __len__(self) -> int:
        return len(self.ids)

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """x, float64 [kept]"""
        if self.shift == 0 and self.divisor == 1:
            return self.given.astype(np.float64, copy=False)
        logits = np.subtract(self.given, self.shift, dtype=np.float64)
        with np.errstate(over="ignore"):
            logits /= self.divisor
        return logits

    def logit(self, place: int) -> float:
        """x of one of them"""
        return (float(self.given[place]) - self.shift) / self.divisor

    @functools.cached_property
    def peak(self) -> float:
        """The largest logit."""
        if self.undivided is not None:
            return (self.undivided.peak - self.shift) / self.divisor
        return self.logit(0 if self.ordered else int(self.given.argmax()))

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
    def weighed(self) -> bool:
        """Whether the weights have been computed."""
        return "weights" in self.__dict__

    @functools.cached_property
    def entropy_nats(self) -> float:
        """-sum p ln p = ln total - sum p (x - peak)"""
        shifted = np.maximum(self.logits - self.peak, -1e300)  # where a logit is -inf, p is 0
        shifted *= self.weights
        return math.log(self.total) - float(shifted.sum()) / self.total

    @functools.cached_property
    def best(self) -> np.ndarray:
        """Places of the most probable, at most 64, by falling logit, ties by rising id."""
        return self.undivided.best if self.undivided is not None else _largest(self.given, min(BEST, len(self)))

    def keep(self, which: np.ndarray | slice, ordered: bool | None = None) -> Candidates:
        """Those at the places `which`."""
        ordered = self.ordered if ordered is None else ordered
        return Candidates(self.ids[which], self.given[which], ordered, self.shift, self.divisor)

    def at_least(self, bound: float) -> Candidates:
        """Those whose logit is at least `bound`."""
        return self.keep(np.flatnonzero(self.logits >= bound))

    def sorted(self) -> Candidates:
        """By falling logit, ties by rising id."""
        return self if self.ordered else self.keep(_falling(self.given), ordered=True)


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
    if c.shift != 0 or c.divisor != 1:
        c = Candidates(c.ids, c.logits, c.ordered)
    return Candidates(c.ids, c.given, c.ordered, shift=c.peak, divisor=t, undivided=c)


# -- filters ------------------------------------------------------------------------------------------------------


def greedy(c: Candidates) -> Candidates:
    """The largest logit; of equal ones the lowest id."""
    best = 0 if c.ordered else int(c.given.argmax())
    return c.keep(slice(best, best + 1), ordered=True)


def top_k(c: Candidates, k: int) -> Candidates:
    """Exactly the k largest logits, ties by lowest id."""
    if k >= len(c):
        return c
    if c.ordered:
        return c.keep(slice(0, k))
    return c.keep(c.best[:k] if k <= BEST else _largest(c.given, k), ordered=True)


def top_k_with_ties(c: Candidates, k: int) -> Candidates:
    """The k largest logits, and every other one equal to the smallest of them."""
    if k >= len(c):
        return c
    return c.at_least(top_k(c, k).logits[-1])


def top_p(c: Candidates, p: float) -> Candidates:
    """From the most probable down, up to and with the first at which the sum of probabilities is >= p."""
    sought = p * c.total
    for beginning in _beginnings(c, p):
        best = beginning.sorted()
        reached = np.cumsum(np.exp(best.logits - c.peak))
        if reached[-1] >= sought:
            break
    return best.keep(slice(0, int(np.searchsorted(reached, sought, side="left")) + 1))


def _beginnings(c: Candidates, p: float) -> Iterator[Candidates]:
    """Candidates with which the order begins, more and more of them, so that no more are sorted than a sum p needs.

    Those with a probability below (1 - p) / kept each have less than 1 - p together: the sum reaches p before them,
    unless rounding decides.
    """
    if not c.ordered:
        yield top_k(c, BEST)
        small = (1 - p) * c.total / len(c)
        if small > 0:
            yield c.at_least(c.peak + math.log(small))
    yield c


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


# -- order ---------------------------------------------------------------------------------------------------------


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest, by falling value, ties by rising place."""
    at = (x >= _at_most_kth(x, k)).nonzero()[0]
    return at[_falling(x[at])[:k]]


def _at_most_kth(x: np.ndarray, k: int) -> float:
    """A bound that at least k values reach, and few more: the k-th largest of the maxima of parts."""
    while len(x) >= 16 * k:
        rows = min(64, len(x) // (4 * k))
        columns = len(x) // rows
        x = x[: rows * columns].reshape(rows, columns).max(axis=0)
    return np.partition(x, len(x) - k)[len(x) - k]


def _falling(x: np.ndarray) -> np.ndarray:
    """Places by falling value, ties by rising place.

    Many values are sorted as integers in the same order, 16 bits after 16 bits, the lowest first: NumPy sorts 16-bit
    integers in linear time, and keeps equal ones in their order.
    """
    if len(x) < 1024:
        return (-x).argsort(kind="stable")
    integer, lowest = (np.int32, 2**31 - 1) if x.dtype == np.float32 else (np.int64, 2**63 - 1)
    bits = (x + 0).view(integer)  # + 0: no -0.0
    keys = bits ^ (bits >> (8 * bits.itemsize - 1) & lowest) ^ lowest
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, 8 * keys.itemsize, 16):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order


@functools.lru_cache(maxsize=4)
def _every_id(vocab: int) -> np.ndarray:
    ids = np.arange(vocab, dtype=np.int32)
    ids.flags.writeable = False
    return ids
