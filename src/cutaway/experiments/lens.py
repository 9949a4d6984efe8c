"""The logit lens: what the model would answer if it stopped after each half of each layer.

The residual stream after any layer has the shape of its end, so the final norm and the head can read it. They are
not computed a second time here: the residuals are patched in as the last layer's output of an ordinary forward pass,
so the lens has the norm, the head and the rounding of the model itself, and its last state is the model's own
logits. Each row is normalised by its own length. Read next: `trace.py`.

Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cutaway.experiments.distributions import token_statistics, top_candidates
from cutaway.experiments.passes import traced_pass
from cutaway.forward.program import Program
from cutaway.forward.taps import Patch

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Lens", "lens", "lens_logits", "residual_states"]

_ROWS_AT_ONCE = 256  # residuals read in one forward pass: 156 MB of logits at 151,936 ids


@dataclass(frozen=True)
class Lens:
    """What each state of the residual stream would predict, at each position looked at.

    `states` are the taps in order: the embedding, then each layer after attention and after its MLP (2 L + 1 states,
    all of them before the final norm; the last one, read through it, is the model's own output). `answers` is the
    token asked about at each position (the model's most probable one, unless told otherwise); ranks count from 1.
    """

    states: tuple[str, ...]
    positions: tuple[int, ...]
    answers: np.ndarray  # int64 [positions]
    ids: np.ndarray  # int64 [states, positions, top]
    logprobs: np.ndarray  # float64 [states, positions, top]
    answer_rank: np.ndarray  # int64 [states, positions]
    answer_logprob: np.ndarray  # float64 [states, positions]
    entropy: np.ndarray  # float64 [states, positions], nats

    @property
    def first(self) -> tuple[int | None, ...]:
        """Index of the first state in which the answer is on top, for each position; None if it never is."""
        return tuple(int(column.argmax()) if column.any() else None for column in (self.answer_rank == 1).T)

    @property
    def settled(self) -> tuple[int | None, ...]:
        """Index of the first state from which the answer stays on top to the end; None if it does not end there."""
        found: list[int | None] = []
        for column in (self.answer_rank == 1).T:  # [states]
            below = np.flatnonzero(~column)
            start = int(below[-1]) + 1 if len(below) else 0
            found.append(start if start < len(column) else None)
        return tuple(found)


def residual_states(program: Program, after_attention: bool = True) -> list[str]:
    """Taps of the residual stream in order: embed, then `layers.i.attn_residual` and `layers.i.residual`."""
    names = ["embed"]
    for layer in range(program.config.num_layers):
        if after_attention:
            names.append(f"layers.{layer}.attn_residual")
        names.append(f"layers.{layer}.residual")
    return names


def lens_logits(llm: LLM, residuals: np.ndarray) -> np.ndarray:
    """Logits of residual vectors through the model's final norm and head.

    Shapes: float32 [rows, hidden] -> float32 [rows, vocab].
    """
    last = f"layers.{llm.config.num_layers - 1}.residual"
    at_once = min(_ROWS_AT_ONCE, llm.max_context)
    parts = []
    for start in range(0, len(residuals), at_once):
        part = np.ascontiguousarray(residuals[start : start + at_once], dtype=np.float32)
        parts.append(traced_pass(llm, [0] * len(part), patch={last: _in_place_of(part)})[0])
    return np.concatenate(parts) if parts else np.empty((0, llm.config.vocab), dtype=np.float32)


def _in_place_of(rows: np.ndarray) -> Patch:
    """A patch that puts `rows` in place of a tensor, however many rows each step of the pass has."""
    done = 0

    def patch(tensor: np.ndarray) -> np.ndarray:
        nonlocal done
        done += len(tensor)
        return rows[done - len(tensor) : done]

    return patch


def lens(
    llm: LLM, tensors: Mapping[str, np.ndarray], positions: Sequence[int], answers: Sequence[int], top: int = 5
) -> Lens:
    """Read recorded residuals through the final norm and the head, at some positions.

    `tensors` holds every tap of `residual_states`, each [num_tokens, hidden]; `answers` the token asked about at
    each position, usually the one the model itself puts first.
    """
    states = residual_states(llm.program)
    rows = np.concatenate([tensors[name][list(positions)] for name in states])  # [states * positions, hidden]
    shape = (len(states), len(positions))
    asked = np.tile(answers, len(states))
    ids, logprobs, rank, logprob, entropy = [], [], [], [], []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        logits = lens_logits(llm, rows[part])
        best, best_logprobs = top_candidates(logits, top)
        statistics = token_statistics(logits, asked[part])
        ids.append(best)
        logprobs.append(best_logprobs)
        rank.append(statistics.rank)
        logprob.append(statistics.logprob)
        entropy.append(statistics.entropy)
    return Lens(
        states=tuple(states),
        positions=tuple(positions),
        answers=np.asarray(answers, dtype=np.int64),
        ids=np.concatenate(ids).reshape(*shape, -1),
        logprobs=np.concatenate(logprobs).reshape(*shape, -1),
        answer_rank=np.concatenate(rank).reshape(shape),
        answer_logprob=np.concatenate(logprob).reshape(shape),
        entropy=np.concatenate(entropy).reshape(shape),
    )
