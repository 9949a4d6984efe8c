"""What a row of logits says: log-probabilities, ranks, entropies, and how far two distributions lie apart.

Plain functions of arrays, in float64, a few rows at a time (a row of Qwen2.5 has 151,936 logits). Knows no model
and no text. Used by `score.py`, `compare.py` and `trace.py`; read next: `score.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["TokenStatistics", "divergences", "log_softmax", "logprobs_of", "token_statistics", "top_candidates"]

_VALUES_AT_ONCE = 1 << 21  # 16 MiB of float64: a block of rows stays near the caches


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _VALUES_AT_ONCE // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log of the softmax over the last dimension, in float64.

    Formula: x - max(x) - ln(sum(exp(x - max(x)))).
    Shapes: [..., vocab] -> [..., vocab].
    """
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class TokenStatistics:
    """One value a row: how the model's distribution there sees one given token.

    `logprob` natural log-probability of the token; `rank` 1 for the most probable (equal logits: lower id first);
    `entropy` of the whole row in nats; `best` the most probable id; `best_logprob` its log-probability.
    """

    logprob: np.ndarray  # float64 [rows]
    rank: np.ndarray  # int64 [rows]
    entropy: np.ndarray  # float64 [rows]
    best: np.ndarray  # int64 [rows]
    best_logprob: np.ndarray  # float64 [rows]


def token_statistics(logits: np.ndarray, tokens: np.ndarray) -> TokenStatistics:
    """Log-probability, rank and entropy for one token a row.

    Shapes: logits [rows, vocab], tokens [rows].
    """
    rows, vocab = logits.shape
    tokens = np.asarray(tokens, dtype=np.int64)
    logprob, entropy, best_logprob = (np.empty(rows) for _ in range(3))
    rank, best = (np.empty(rows, dtype=np.int64) for _ in range(2))
    for part in _blocks(rows, vocab):
        block, chosen = logits[part], tokens[part]
        own = np.take_along_axis(block, chosen[:, None], axis=1)
        tie_before = (block == own) & (np.arange(vocab) < chosen[:, None])
        rank[part] = 1 + ((block > own) | tie_before).sum(axis=1)
        best[part] = block.argmax(axis=1)  # argmax gives the first, so the lowest id of equals
        log_p = log_softmax(block)
        p = np.exp(log_p)
        entropy[part] = -np.where(p > 0, p * log_p, 0.0).sum(axis=1)
        logprob[part] = np.take_along_axis(log_p, chosen[:, None], axis=1)[:, 0]
        best_logprob[part] = log_p.max(axis=1)
    return TokenStatistics(logprob, rank, entropy, best, best_logprob)


def logprobs_of(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """Log-probabilities of a few fixed ids at every row: float64 [rows, len(ids)]."""
    result = np.empty((len(logits), len(ids)))
    for part in _blocks(*logits.shape):
        result[part] = log_softmax(logits[part])[:, ids]
    return result


def top_candidates(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k most probable ids of each row and their log-probabilities, most probable first, ties by lowest id.

    Shapes: logits [rows, vocab] -> int64 [rows, k], float64 [rows, k].
    """
    rows, vocab = logits.shape
    k = min(k, vocab)
    ids, values = np.empty((rows, k), dtype=np.int64), np.empty((rows, k))
    for part in _blocks(rows, vocab):
        log_p = log_softmax(logits[part])
        for offset, row in enumerate(log_p):
            least = -np.partition(-row, k - 1)[k - 1]
            candidates = np.flatnonzero(row >= least)  # more than k where the last place is shared
            order = candidates[np.lexsort((candidates, -row[candidates]))][:k]
            ids[part.start + offset], values[part.start + offset] = order, row[order]
    return ids, values


def divergences(logits_p: np.ndarray, logits_q: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of q from p at each row, in nats: sum of p (ln p - ln q).

    Rows of different width (padded vocabularies) are compared over the ids both have.
    Shapes: [rows, vocab], [rows, vocab'] -> float64 [rows].
    """
    vocab = min(logits_p.shape[1], logits_q.shape[1])
    result = np.empty(len(logits_p))
    for part in _blocks(len(logits_p), vocab):
        log_p, log_q = log_softmax(logits_p[part, :vocab]), log_softmax(logits_q[part, :vocab])
        p = np.exp(log_p)
        result[part] = np.where(p > 0, p * (log_p - log_q), 0.0).sum(axis=1)
    return np.maximum(result, 0.0)  # rounding can leave -1e-17
