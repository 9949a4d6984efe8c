"""Attention weights, recomputed from the tapped queries and keys for the rows asked.

The kernels never store the weights: they are worked out again here, in float64, from `layers.i.attn.q_rope` and
`layers.i.attn.k_rope`, so looking costs the fast path nothing. Read next: `trace.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cutaway.config import ModelConfig
from cutaway.errors import RequestError

__all__ = ["AttentionMap", "attention_taps", "attention_weights"]


@dataclass(frozen=True)
class AttentionMap:
    """Attention weights of some heads of one layer.

    `weights` is float64 [heads, rows, keys], as Hugging Face's `attentions[layer][0]` restricted to `heads` and
    `rows`; each row sums to 1, and keys after the row's own position are 0.
    """

    layer: int
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    weights: np.ndarray


def attention_taps(layer: int) -> tuple[str, str]:
    """The names to tap for `attention_weights` of a layer."""
    return f"layers.{layer}.attn.q_rope", f"layers.{layer}.attn.k_rope"


def attention_weights(
    config: ModelConfig, q: np.ndarray, k: np.ndarray, heads: Sequence[int], rows: Sequence[int]
) -> np.ndarray:
    """softmax(q k^T / sqrt(head_dim)) over positions 0..own, for the asked heads and rows.

    Shapes: q [num_tokens, num_heads * head_dim], k [num_tokens, num_kv_heads * head_dim], one sequence from
    position 0 -> [len(heads), len(rows), num_tokens].
    Numerics: float64 throughout; the keys are taken before the KV cache rounds them.
    Raises: RequestError for a head or a row that does not exist.
    """
    num_tokens = len(q)
    for what, values, limit in (("head", heads, config.num_heads), ("row", rows, num_tokens)):
        for value in values:
            if not 0 <= value < limit:
                raise RequestError(f"no such {what}", found=value, expected=f"0 to {limit - 1}", param="attention")
    queries = q.reshape(num_tokens, config.num_heads, config.head_dim)
    keys = k.reshape(num_tokens, config.num_kv_heads, config.head_dim)
    result = np.zeros((len(heads), len(rows), num_tokens))
    for h, head in enumerate(heads):
        head_keys = keys[:, head // config.group].astype(np.float64)  # [num_tokens, head_dim]
        for r, row in enumerate(rows):
            scores = head_keys[: row + 1] @ queries[row, head].astype(np.float64) / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            result[h, r, : row + 1] = weights / weights.sum()
    return result
