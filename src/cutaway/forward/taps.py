"""Taps: look at, or replace, any tensor of a running forward pass by its name.

A tap names operations of the Program by exact name or shell pattern (`layers.*.attn.q`). An interpreter stops where
a tapped tensor has been made, calls `Taps.visit`, and goes on with what it gets back. With no taps nothing is called
and nothing is copied. Read next: `reference.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from cutaway.errors import RequestError
from cutaway.forward.program import Program

if TYPE_CHECKING:
    from cutaway.forward.program import Batch

__all__ = ["Recording", "Taps", "matching"]

Patch = Callable[[np.ndarray], "np.ndarray | None"]


def matching(program: Program, patterns: Iterable[str]) -> list[str]:
    """Names of `program` that match any pattern, in order of execution. A pattern that matches none is an error."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = [pattern] if pattern in program else fnmatch.filter(program.names, pattern)
        if not found:
            raise RequestError(
                "no tensor of this Program matches",
                found=repr(pattern),
                hint="cutaway trace lists the names",
                param="tap",
            )
        chosen.update(found)
    return [name for name in program.names if name in chosen]


class Recording:
    """Tensors kept by taps: `recording[name]` is [all tokens so far, width] float32, steps one after another.

    `steps[name]` keeps them apart, one array a step; `positions` holds each step's token positions.
    """

    def __init__(self) -> None:
        self.steps: dict[str, list[np.ndarray]] = {}
        self.positions: list[np.ndarray] = []

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.steps:
            raise KeyError(f"{name} was not recorded; recorded: {', '.join(self.steps) or 'nothing'}")
        return np.concatenate(self.steps[name])

    def __contains__(self, name: str) -> bool:
        return name in self.steps

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return list(self.steps)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for arrays in self.steps.values() for array in arrays)


class Taps:
    """What to record (`record`: names or patterns) and what to replace (`patch`: name or pattern -> function).

    A patch function gets the tensor [rows, width] float32 and gives back its replacement of the same shape, or None
    to leave it. The recorded value is the one that goes on, after patching.
    """

    def __init__(self, program: Program, record: Iterable[str] = (), patch: Mapping[str, Patch] | None = None) -> None:
        self._record = set(matching(program, record))
        self._patches: dict[str, list[Patch]] = {}
        for pattern, function in (patch or {}).items():
            for name in matching(program, [pattern]):
                self._patches.setdefault(name, []).append(function)
        self.names = frozenset(self._record | set(self._patches))
        self.patched = frozenset(self._patches)
        self.recording = Recording()
        self._before: dict[str, int] = {}  # arrays recorded before the step under way

    def begin(self, batch: Batch) -> None:
        """Called by an interpreter at the start of a step."""
        self.recording.positions.append(np.array(batch.positions))
        self._before = {name: len(arrays) for name, arrays in self.recording.steps.items()}

    def visit(self, name: str, tensor: np.ndarray) -> np.ndarray | None:
        """Called by an interpreter with each tapped tensor (a view it may reuse). Gives back a replacement or None.

        Where a patch fails, nothing of its step stays in the recording.
        """
        try:
            return self._visit(name, tensor)
        except BaseException:
            self.recording.positions.pop()
            for recorded, arrays in self.recording.steps.items():
                del arrays[self._before.get(recorded, 0) :]
            raise

    def _visit(self, name: str, tensor: np.ndarray) -> np.ndarray | None:
        replacement = None
        for function in self._patches.get(name, ()):
            current = tensor if replacement is None else replacement
            result = function(current.copy())
            if result is None:
                continue
            result = np.ascontiguousarray(result, dtype=np.float32)
            if result.shape != tensor.shape:
                raise RequestError(
                    f"patch of {name} has the wrong shape", found=result.shape, expected=tensor.shape, param="patch"
                )
            replacement = result
        if name in self._record:
            kept = tensor.copy() if replacement is None else replacement
            self.recording.steps.setdefault(name, []).append(kept)
        return replacement
