"""Two runs compared tap by tap: where do they first part, and by how much?

The two sides are mappings of named tensors: recordings of two settings or of two formats of a model, or a dump saved
from somewhere else (`tensors.py` reads it and translates Hugging Face's names). Read next: `compare.py`, which
compares what two models say.

To save a dump from Hugging Face transformers that `load_tensors` and `from_hugging_face` understand:

    out = model(torch.tensor([ids]), output_hidden_states=True)
    dump = {f"hidden_states.{i}": h[0].float().numpy() for i, h in enumerate(out.hidden_states)}
    numpy.savez("theirs.npz", logits=out.logits[0].float().numpy(), **dump)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import RequestError
from cutaway.experiments.passes import prompt_ids, traced_pass
from cutaway.forward.program import Program

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Diff", "TapDifference", "diff", "diff_models", "diff_tensors", "record"]

DEFAULT_TAPS = ("embed", "layers.*.attn_residual", "layers.*.residual", "final_norm", "logits")


@dataclass(frozen=True)
class TapDifference:
    """How far one tensor of run B lies from run A's.

    `relative` is ||b - a|| / ||a|| over the whole tensor, the number the tolerance is for; `max_abs` the largest
    difference of one value, found in token row `worst_row`; `worst_relative` the largest ||b - a|| / ||a|| of a row;
    `cosine` the angle between both as long vectors; `nans` counts values that are NaN on one side or both. With NaN,
    and with unequal shapes, `relative` is infinite.
    """

    name: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    relative: float
    worst_relative: float
    max_abs: float
    worst_row: int | None
    cosine: float
    nans: int
    equal_bits: bool
    departs: bool


@dataclass(frozen=True)
class Diff:
    """All taps compared, in order of execution. `only_a` and `only_b` name what the other side does not have."""

    label_a: str
    label_b: str
    tolerance: float
    taps: tuple[TapDifference, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    @property
    def first(self) -> TapDifference | None:
        """The first tap that departs beyond the tolerance."""
        return next((tap for tap in self.taps if tap.departs), None)

    @property
    def first_bit(self) -> TapDifference | None:
        """The first tap that is not the same bits."""
        return next((tap for tap in self.taps if not tap.equal_bits), None)


def diff_tensors(name: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> TapDifference:
    """Compare one tensor of both sides; arithmetic in float64.

    Shapes: [rows, width] both; other shapes are taken as rows of their last dimension.
    """
    equal_bits = a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if a.shape != b.shape:
        inf = float("inf")
        return TapDifference(name, a.shape, b.shape, inf, inf, inf, None, float("nan"), 0, False, True)
    left, right = (np.asarray(x, dtype=np.float64).reshape(-1, x.shape[-1] if x.ndim else 1) for x in (a, b))
    nans = int((np.isnan(left) | np.isnan(right)).sum())
    if nans:
        first_bad = int(np.isnan(left + right).any(axis=1).argmax())
        inf, nan = float("inf"), float("nan")
        return TapDifference(name, a.shape, b.shape, inf, inf, nan, first_bad, nan, nans, equal_bits, True)
    delta = right - left
    row_error, row_size = np.linalg.norm(delta, axis=1), np.linalg.norm(left, axis=1)
    relative = _ratio(float(np.linalg.norm(delta)), float(np.linalg.norm(left)))
    sizes = float(np.linalg.norm(left) * np.linalg.norm(right))
    worst = np.abs(delta).max(axis=1, initial=0.0)
    return TapDifference(
        name=name,
        shape_a=a.shape,
        shape_b=b.shape,
        relative=relative,
        worst_relative=max((_ratio(float(e), float(s)) for e, s in zip(row_error, row_size, strict=True)), default=0.0),
        max_abs=float(worst.max(initial=0.0)),
        worst_row=int(worst.argmax()) if worst.any() else None,
        cosine=min(1.0, max(-1.0, float((left * right).sum()) / sizes)) if sizes else float("nan"),
        nans=0,
        equal_bits=equal_bits,
        departs=relative > tolerance,
    )


def _ratio(error: float, size: float) -> float:
    if error == 0.0:
        return 0.0
    return error / size if size else float("inf")


def diff(
    program: Program,
    a: Mapping[str, np.ndarray],
    b: Mapping[str, np.ndarray],
    *,
    tolerance: float = 1e-3,
    labels: tuple[str, str] = ("A", "B"),
) -> Diff:
    """Compare two sets of named tensors in the Program's order of execution.

    `tolerance` is for the relative difference ||b - a|| / ||a|| of a tap; 0 asks for equal values.
    Raises: RequestError if the two sides have no name in common.
    """
    common = [name for name in program.names if name in a and name in b]
    if not common:
        raise RequestError(
            "the two runs have no tensor in common",
            found=f"{_few(a)} against {_few(b)}",
            hint="names are the Program's, or Hugging Face's module and hidden state names",
        )
    return Diff(
        labels[0],
        labels[1],
        tolerance,
        tuple(diff_tensors(name, a[name], b[name], tolerance) for name in common),
        tuple(name for name in a if name not in b),
        tuple(name for name in b if name not in a),
    )


def _few(tensors: Mapping[str, np.ndarray]) -> str:
    names = list(tensors)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "nothing"


def record(llm: LLM, ids: Sequence[int], patterns: Iterable[str] = DEFAULT_TAPS) -> dict[str, np.ndarray]:
    """One forward pass over `ids`, all rows: the tensors that match, by name, each [num_tokens, width]."""
    return traced_pass(llm, ids, patterns)[1]


def diff_models(
    llm_a: LLM,
    llm_b: LLM,
    prompt: str | Sequence[int],
    patterns: Iterable[str] = DEFAULT_TAPS,
    *,
    tolerance: float = 1e-3,
    labels: tuple[str, str] | None = None,
) -> Diff:
    """The same token ids through two models, or one model under two settings.

    A string is tokenised by A; B must read it as the same ids.
    Raises: RequestError if the two tokenise the prompt differently.
    """
    patterns = tuple(patterns)
    ids = prompt_ids(llm_a, prompt)
    if prompt_ids(llm_b, prompt) != ids:
        raise RequestError("the two models read the prompt as different tokens", hint="compare works on texts")
    names = labels or (llm_a.name, llm_b.name)
    a, b = record(llm_a, ids, patterns), record(llm_b, ids, patterns)
    return diff(llm_a.program, a, b, tolerance=tolerance, labels=names)
