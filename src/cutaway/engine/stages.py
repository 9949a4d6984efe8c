"""The stages of sampling: each takes the candidates for the next token and gives back new ones (NumPy, float64).

A logits processor changes logits; a filter removes candidates and leaves the logits of the rest alone. The order in
which they are applied, and which definition of a filter, is a dialect: read `dialects.py` next.

A stage sees the whole vocabulary or only the k largest logits (`TopLogits`), and gives the same bits for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Candidates",
    "History",
    "Stage",
    "add_bias",
    "entropy",
    "greedy",
    "min_p",
    "penalise_counts",
    "penalise_repetition",
    "pick",
    "probabilities",
    "temperature",
    "top_k",
    "top_k_with_ties",
    "top_p",
    "top_p_from_below",
]


@dataclass(frozen=True)
class Candidates:
    """What is left to choose from: `ids` int [kept] and `logits` float64 [kept].

    They stand by falling logit, ties by rising id (`ordered`), or by rising id.
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

    @property
    def peak(self) -> float:
        return float(self.logits[0] if self.ordered else self.logits.max())

    def keep(self, which: np.ndarray | slice, ordered: bool | None = None) -> Candidates:
        """Those at the places (or under the mask) `which`."""
        return Candidates(self.ids[which], self.logits[which], self.ordered if ordered is None else ordered)

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
    with np.errstate(over="ignore"):
        return Candidates(c.ids, (c.logits - c.peak) / t, c.ordered)


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
        c = c.keep(c.logits >= _at_most_kth(c.logits, k)).sorted()
    return c.keep(slice(0, k))


def top_k_with_ties(c: Candidates, k: int) -> Candidates:
    """The k largest logits, and every other one equal to the smallest of them."""
    if k >= len(c):
        return c
    return c.keep(c.logits >= top_k(c, k).logits[-1])


def top_p(c: Candidates, p: float) -> Candidates:
    """From the most probable down, up to and with the first at which the sum of probabilities is >= p."""
    mass = probabilities(c)
    if not c.ordered:
        # The tail below this bound weighs less than 1 - p altogether, so it lies past the crossing: do not sort it.
        above = mass >= 0.5 * (1 - p) / len(c)
        c = c.keep(above)
        order = np.argsort(-c.logits, kind="stable")
        c, mass = c.keep(order, ordered=True), mass[above][order]
    crossing = int(np.searchsorted(np.cumsum(mass), p, side="left"))
    return c.keep(slice(0, crossing + 1))


def top_p_from_below(c: Candidates, p: float) -> Candidates:
    """Without those, from the least probable up, whose sum of probabilities is <= 1 - p. One always stays.

    The same set as `top_p` except where the sum meets the line: there it keeps the token that `top_p` stops before.
    """
    c = c.sorted()
    from_below = np.cumsum(probabilities(c)[::-1])[::-1]
    kept = int(np.count_nonzero(from_below > 1 - p))
    return c.keep(slice(0, max(kept, 1)))


def min_p(c: Candidates, p: float) -> Candidates:
    """Those whose probability is at least p times that of the most probable: x >= max x + ln p, for p > 0."""
    return c.keep(c.logits >= c.peak + np.log(p))


# -- distributions ------------------------------------------------------------------------------------------------


def probabilities(c: Candidates) -> np.ndarray:
    """softmax(x) = exp(x - max x) / sum exp(x - max x), float64 [kept]"""
    weights = np.exp(c.logits - c.peak)
    return weights / weights.sum()


def entropy(mass: np.ndarray) -> float:
    """-sum p ln p, in nats"""
    mass = mass[mass > 0]
    return float(-np.dot(mass, np.log(mass)))


def pick(mass: np.ndarray, u: float) -> tuple[int, float]:
    """Place of the first candidate at which the cumulative mass exceeds u, and the mass before it. u in [0, 1).

    Two levels, so that a large vocabulary is summed by chunks and only one chunk is walked through.
    """
    chunk = 1024
    target = u * mass.sum()
    sums = np.cumsum(np.add.reduceat(mass, np.arange(0, len(mass), chunk)))
    part = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
    before = float(sums[part - 1]) if part else 0.0
    inside = before + np.cumsum(mass[part * chunk : (part + 1) * chunk])
    place = int(np.searchsorted(inside, target, side="right"))
    if place == len(inside):  # rounding put the target past the end: the last one that can be drawn
        place = int(np.flatnonzero(mass[part * chunk : (part + 1) * chunk])[-1])
    return part * chunk + place, float(inside[place - 1]) if place else before


def _at_most_kth(x: np.ndarray, k: int) -> float:
    """A bound that at least k values reach, close to the k-th largest: the k-th largest of the maxima of parts."""
    width = 64
    parts = len(x) // width
    maxima = x[: parts * width].reshape(parts, width).max(axis=1) if k <= parts else x
    return float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])


@functools.lru_cache(maxsize=4)
def _every_id(vocab: int) -> np.ndarray:
    ids = np.arange(vocab, dtype=np.int32)
    ids.flags.writeable = False
    return ids
