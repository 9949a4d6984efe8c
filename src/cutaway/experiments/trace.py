"""One forward pass with its side open: shapes, bytes, work and time of every operation, and what the tensors held.

Runs the model's own forward pass with taps and puts together what `table.py`, `lens.py` and `attention.py` make of
it. Computes; prints nothing. Read next: `diff.py`, which compares two such passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import RequestError
from cutaway.experiments.attention import AttentionMap, attention_taps, attention_weights
from cutaway.experiments.distributions import top_candidates
from cutaway.experiments.lens import Lens, lens, residual_states
from cutaway.experiments.passes import profile_pass, prompt_ids, token_texts, traced_pass
from cutaway.experiments.table import OperationRow, operation_table
from cutaway.experiments.tensors import save_tensors
from cutaway.forward.taps import Patch, matching

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Candidate", "ResidualNorms", "TapStatistics", "Trace", "statistics", "trace"]

LENS_POSITIONS = 8  # the last tokens of the prompt that the lens looks at, unless told otherwise


@dataclass(frozen=True)
class TapStatistics:
    """A tensor in seven numbers. `norm` is the Euclidean length of all values; NaNs are counted and left out."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    min: float
    max: float
    norm: float
    nans: int


@dataclass(frozen=True)
class ResidualNorms:
    """Length of each token's residual vector after each half layer. `norms` is float64 [states, num_tokens]."""

    states: tuple[str, ...]
    norms: np.ndarray


@dataclass(frozen=True)
class Candidate:
    """A next token the model considers, most probable first."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Trace:
    """What one forward pass over a prompt did.

    `tensors` holds the tapped tensors by name, each [num_tokens, width] float32 (`Trace.save` writes them).
    """

    model: str
    prompt: str
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    table: tuple[OperationRow, ...]
    residual: ResidualNorms
    statistics: tuple[TapStatistics, ...]
    next_tokens: tuple[Candidate, ...]
    lens: Lens | None = None
    lens_texts: Mapping[int, str] = field(default_factory=dict)  # text of every id the lens names
    attention: tuple[AttentionMap, ...] = ()
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def time_ns(self) -> int | None:
        """Time of all operations together, where it was measured."""
        times = [row.time_ns for row in self.table if row.time_ns is not None]
        return sum(times) if times else None

    def save(self, path: str | Path) -> Path:
        """Write the tapped tensors, and attention maps as `layers.i.attn.weights` [heads, rows, keys], to a file.

        Raises: RequestError for a suffix other than .npz and .safetensors.
        """
        maps: dict[str, np.ndarray] = {}
        for layer in dict.fromkeys(map.layer for map in self.attention):
            maps[f"layers.{layer}.attn.weights"] = np.concatenate(
                [m.weights for m in self.attention if m.layer == layer]
            )
        return save_tensors(path, {"token_ids": np.array(self.ids, dtype=np.int32), **self.tensors, **maps})


def statistics(name: str, tensor: np.ndarray) -> TapStatistics:
    """Mean, standard deviation, extremes and length of a tensor, in float64.

    Raises nothing for an empty tensor or one of NaN only: its numbers are NaN.
    """
    values = np.asarray(tensor, dtype=np.float64).ravel()
    good = values[~np.isnan(values)]
    nans = int(values.size - good.size)
    if not good.size:
        nan = float("nan")
        return TapStatistics(name, tensor.shape, nan, nan, nan, nan, nan, nans)
    with np.errstate(invalid="ignore", over="ignore"):  # infinities make mean and std infinite or NaN, and may
        mean, std, norm = float(good.mean()), float(good.std()), float(np.linalg.norm(good))
    return TapStatistics(name, tensor.shape, mean, std, float(good.min()), float(good.max()), norm, nans)


def trace(
    llm: LLM,
    prompt: str | Sequence[int],
    tap: Iterable[str] = (),
    *,
    lens_positions: int | Sequence[int] | None = LENS_POSITIONS,
    lens_top: int = 5,
    answer: int | None = None,
    attention: Iterable[tuple[int, int | None]] = (),
    attention_rows: Sequence[int] | None = None,
    patch: Mapping[str, Patch] | None = None,
    top: int = 10,
    time: bool = True,
) -> Trace:
    """Run one forward pass over `prompt` (text as it is, or token ids) and open it.

    `tap`: names or patterns of tensors to keep and describe. `lens_positions`: how many of the last tokens the logit
    lens looks at, or which positions, or None for no lens; `answer` asks it about that token instead of the model's
    own. `attention`: (layer, head) pairs, head None for all heads of the layer; `attention_rows`: only these query
    positions. `patch`: replacements by name, as for taps. `time`: run once more without taps, for the clock.
    Raises: RequestError for an unknown tap, layer, head or position; ContextLengthError for a prompt too long.
    """
    ids = prompt_ids(llm, prompt)
    program, config = llm.program, llm.config
    heads_of = _heads(llm, attention)
    positions = _positions(lens_positions, len(ids))
    rows = list(range(len(ids))) if attention_rows is None else [int(row) for row in attention_rows]

    asked = matching(program, tap)
    states = residual_states(program)
    needed = [*asked, *states, *(name for layer in heads_of for name in attention_taps(layer))]
    logits, tensors = traced_pass(llm, ids, needed, patch)

    norms = np.stack([np.linalg.norm(tensors[name].astype(np.float64), axis=1) for name in states])
    maps = []
    for layer, heads in heads_of.items():
        q, k = (tensors[name] for name in attention_taps(layer))
        maps.append(AttentionMap(layer, heads, tuple(rows), attention_weights(config, q, k, heads, rows)))

    found, texts = None, {}
    if positions:
        answers = logits[positions].argmax(axis=1) if answer is None else np.full(len(positions), answer)
        found = lens(llm, tensors, positions, [int(a) for a in answers], lens_top)
        named = sorted({int(i) for i in found.ids.ravel()} | {int(i) for i in found.answers})
        texts = dict(zip(named, token_texts(llm, named), strict=True))

    best, logprobs = top_candidates(logits[-1:], top)
    best_texts = token_texts(llm, best[0])
    return Trace(
        model=llm.name,
        prompt=prompt if isinstance(prompt, str) else llm.detokenize(ids),
        ids=tuple(ids),
        texts=tuple(token_texts(llm, ids)),
        table=tuple(
            operation_table(
                program,
                llm.checkpoint.weights,
                positions=range(len(ids)),
                num_outputs=len(ids),
                kv_bytes_per_token=llm.kv_bytes_per_token,
                profile=profile_pass(llm, ids) if time else (),
            )
        ),
        residual=ResidualNorms(tuple(states), norms),
        statistics=tuple(statistics(name, tensors[name]) for name in asked),
        next_tokens=tuple(
            Candidate(int(i), t, float(p)) for i, t, p in zip(best[0], best_texts, logprobs[0], strict=True)
        ),
        lens=found,
        lens_texts=texts,
        attention=tuple(maps),
        tensors={name: tensors[name] for name in asked},
    )


def _heads(llm: LLM, attention: Iterable[tuple[int, int | None]]) -> dict[int, tuple[int, ...]]:
    """The heads asked for, by layer."""
    config = llm.config
    heads: dict[int, list[int]] = {}
    for layer, head in attention:
        if not 0 <= layer < config.num_layers:
            raise RequestError(
                "no such layer", found=layer, expected=f"0 to {config.num_layers - 1}", param="attention"
            )
        heads.setdefault(layer, []).extend(range(config.num_heads) if head is None else [head])
    return {layer: tuple(dict.fromkeys(chosen)) for layer, chosen in heads.items()}


def _positions(asked: int | Sequence[int] | None, num_tokens: int) -> list[int]:
    if asked is None:
        return []
    if isinstance(asked, int):
        return list(range(max(0, num_tokens - asked), num_tokens))
    for position in asked:
        if not 0 <= position < num_tokens:
            raise RequestError("no such position", found=position, expected=f"0 to {num_tokens - 1}", param="lens")
    return [int(position) for position in asked]
