"""The PyTorch interpreter: the same Program, over a grid of token ids, with gradients through every operation.

It trains (`cutaway/train/`): all rows of a batch are whole windows, so attention needs no KV cache, and every position
has logits. What each operation means is said in `reference.py`; a function here says how PyTorch is asked for it.
Linear operations that read the same tensor (q, k and v; gate and up) are one product of one weight, and the names of
the Program are views of it. PyTorch is imported with this module, so nothing imports it but who trains. Read next:
`train/loop.py`.

B = rows of the grid, L = tokens in a row, T = B * L = num_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import KernelError
from cutaway.forward.program import Attribute, Op, Program, refuse_unknown
from cutaway.forward.rope import rope_tables
from cutaway.forward.taps import Taps

__all__ = ["TorchProgram"]


@dataclass(frozen=True)
class Positions:
    """What taps are told of a step: the position of each token [T]."""

    positions: np.ndarray


class TorchProgram:
    """Runs a Program with PyTorch; `parameters` are its trainable tensors.

    `weights`: every weight of the Program by name, float arrays of the shapes in `program.weight_shapes` (copied).
    Raises: KernelError for a weight that is missing or has another shape, UnsupportedError for an operation that is
    not known here.
    """

    def __init__(self, program: Program, weights: Mapping[str, np.ndarray], dtype: torch.dtype = torch.float32) -> None:
        known: dict[str, dict[str, tuple[Attribute, ...]]] = {kind: {} for kind in _KINDS}
        refuse_unknown(program, "the PyTorch interpreter", known | {"attention": {"scale": ()}})
        for name, shape in program.weight_shapes.items():
            found = weights[name].shape if name in weights else "no such weight"
            if found != shape:
                raise KernelError(f"weight {name}", found=found, expected=shape)
        self.program, self.dtype = program, dtype
        self.parameters: dict[str, Tensor] = {}  # by the name of the first weight in it
        self._places: dict[str, tuple[str, int, int]] = {}  # weight -> the parameter it lies in, first row, rows
        self._groups = _groups(program)
        grouped = [names for group in self._groups.values() for names in _weights_of(program, group)]
        inside = {name for names in grouped for name in names}
        for names in [*grouped, *([name] for name in program.weight_shapes if name not in inside)]:
            whole = np.concatenate([weights[name] for name in names])
            self.parameters[names[0]] = torch.tensor(whole, dtype=dtype, requires_grad=True)
            first = 0
            for name in names:
                rows = program.weight_shapes[name][0]
                self._places[name] = (names[0], first, rows)
                first += rows
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_use = {name: index for index, op in enumerate(program) for name in op.inputs}

    def weight(self, name: str) -> Tensor:
        """A weight of the Program: a view of the parameter it lies in, outside of any gradient."""
        parameter, first, rows = self._places[name]
        return self.parameters[parameter].detach()[first : first + rows]

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of a weight of the Program after a backward pass; None before one."""
        parameter, first, rows = self._places[name]
        gradient = self.parameters[parameter].grad
        return None if gradient is None else gradient[first : first + rows]

    def named_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every weight of the Program as a float32 array, in the Program's order (views where it is float32)."""
        for name in self.program.weight_shapes:
            yield name, self.weight(name).to(torch.float32).numpy()

    def forward(self, ids: Tensor, taps: Taps | None = None) -> Tensor:
        """Logits of every position of a grid of token ids.

        Each row of the grid is a sequence by itself, from position 0 on.
        Shapes: ids int64 [B, L] -> [B * L, vocab], rows of the grid one after another.
        """
        tapped = taps.names if taps is not None else frozenset()
        if taps is not None:
            taps.begin(Positions(np.tile(np.arange(ids.shape[1], dtype=np.int32), len(ids))))  # type: ignore[arg-type]
        tensors: dict[str, Tensor] = {}
        for index, op in enumerate(self.program):
            if op.name not in tensors:  # else it was made with the first of its group
                if op.name in self._groups:
                    tensors |= self._products(self._groups[op.name], tensors)
                else:
                    tensors[op.name] = _KINDS[op.kind](self, op, [tensors[name] for name in op.inputs], ids)
            if taps is not None and op.name in tapped:
                replacement = taps.visit(op.name, tensors[op.name].detach().to(torch.float32).numpy())
                if replacement is not None:
                    tensors[op.name] = torch.from_numpy(replacement).to(self.dtype)
            for name in op.inputs:
                if self._last_use[name] == index:
                    tensors.pop(name, None)
        return tensors[self.program.names[-1]]  # [T, vocab]

    # -- one method a kind -------------------------------------------------------------------------------------------

    def _products(self, group: list[Op], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Linear operations of one input as one product, taken apart again: [T, sum of widths] -> [T, width] each."""
        made = self._linear(group[0], [tensors[group[0].inputs[0]]], None)
        return dict(zip((op.name for op in group), made.split([op.width for op in group], dim=1), strict=True))

    def _embed(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        return F.embedding(ids.reshape(-1), self.parameters[op.weights[0]])  # [T, hidden]

    def _rms_norm(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        return F.rms_norm(inputs[0], (op.width,), self.parameters[op.weights[0]], self.program.config.rms_norm_eps)

    def _linear(self, op: Op, inputs: list[Tensor], ids: Tensor | None) -> Tensor:
        bias = self.parameters[op.weights[1]] if len(op.weights) > 1 else None
        return F.linear(inputs[0], self.parameters[op.weights[0]], bias)  # [T, width]

    def _head_norm(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        weight = self.parameters[op.weights[0]]  # [head_dim]
        heads = inputs[0].view(len(inputs[0]), -1, len(weight))  # [T, heads, head_dim]
        return F.rms_norm(heads, (len(weight),), weight, self.program.config.rms_norm_eps).reshape(len(heads), -1)

    def _rope(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        cos, sin = self._cos_sin(ids.shape[1])  # [L, 1, head_dim / 2]: the same for all heads and rows
        heads = inputs[0].reshape(*ids.shape, -1, self.program.config.head_dim)  # [B, L, heads, head_dim]
        a, b = heads.chunk(2, dim=-1)  # [B, L, heads, head_dim / 2] each
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).view(-1, op.width)

    def _attention(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        shape = (*ids.shape, -1, self.program.config.head_dim)
        q, k, v = (x.view(shape).transpose(1, 2) for x in inputs)  # [B, heads, L, head_dim]
        grouped, scale = self.program.config.group > 1, op.attribute("scale")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(-1, op.width)  # [T, num_heads * head_dim]

    def _silu_mul(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        return F.silu(inputs[0]) * inputs[1]

    def _add(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        return inputs[0] + inputs[1]

    def _select_rows(self, op: Op, inputs: list[Tensor], ids: Tensor) -> Tensor:
        return inputs[0]  # training wants all of them

    def _cos_sin(self, length: int) -> tuple[Tensor, Tensor]:
        if length not in self._tables:
            cos, sin = (torch.from_numpy(t).to(self.dtype)[:, None] for t in rope_tables(self.program.config, length))
            self._tables[length] = cos, sin
        return self._tables[length]


Step = Callable[[TorchProgram, Op, "list[Tensor]", Tensor], Tensor]
_KINDS: dict[str, Step] = {
    "embed": TorchProgram._embed,
    "rms_norm": TorchProgram._rms_norm,
    "linear": TorchProgram._linear,
    "head_norm": TorchProgram._head_norm,
    "rope": TorchProgram._rope,
    "attention": TorchProgram._attention,
    "silu_mul": TorchProgram._silu_mul,
    "add": TorchProgram._add,
    "select_rows": TorchProgram._select_rows,
}


def _groups(program: Program) -> dict[str, list[Op]]:
    """Neighbouring linear operations that read the same tensor, by the name of the first; groups of one are none."""
    groups: list[list[Op]] = []
    for op in program:
        last = groups[-1][-1] if groups else None
        alike = last is not None and (op.kind, op.inputs, len(op.weights)) == ("linear", last.inputs, len(last.weights))
        if alike and last is not None and last.kind == "linear":
            groups[-1].append(op)
        else:
            groups.append([op])
    return {group[0].name: group for group in groups if len(group) > 1}


def _weights_of(program: Program, group: list[Op]) -> Iterator[list[str]]:
    """The weights of a group that lie in one parameter: the matrices, then the biases if there are any."""
    for index in range(len(group[0].weights)):
        yield [op.weights[index] for op in group]
