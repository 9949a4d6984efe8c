"""Repetition in generated tokens: loops, and how varied several texts are. Knows ids only. Read next: `sampler.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Loop", "distinct", "find_loop"]

MIN_COPIES = 3
MIN_TOKENS = 8  # "ha ha ha" is three copies and no loop


@dataclass(frozen=True)
class Loop:
    """A span of `period` tokens that comes `copies` times (a whole number and a rest) in a row from `start` on."""

    start: int
    period: int
    tokens: int
    at_end: bool

    @property
    def copies(self) -> float:
        return self.tokens / self.period


def find_loop(ids: Sequence[int], min_copies: int = MIN_COPIES, min_tokens: int = MIN_TOKENS) -> Loop | None:
    """The longest stretch that repeats one span at least `min_copies` times without a break, or None.

    Of stretches of the same length the one with the shortest span is given.
    """
    tokens = np.asarray(ids)
    best: Loop | None = None
    for period in range(1, len(tokens) // min_copies + 1):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])  # starts and ends of runs, by turns
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = last - first + period
            if length < max(min_tokens, min_copies * period):
                continue
            if best is None or length > best.tokens:
                best = Loop(first, period, length, first + length == len(tokens))
    return best


def distinct(texts: Iterable[Sequence[int]], n: int) -> float | None:
    """Distinct n-grams over all n-grams of several texts: 1.0 is no n-gram twice. None where there is no n-gram.

    Source: Li et al., "A diversity-promoting objective function for neural conversation models", NAACL 2016.
    """
    grams = [tuple(ids[i : i + n]) for ids in texts for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
