"""The forward pass as data: a Program is a list of named operations over named tensors.

An operation is named after the tensor it makes (`layers.3.attn.q`), so a name is at once a row of the table of
shapes, a tap, and a line of the profile. `decoder.py` writes the Program; `reference.py` (NumPy) and `native.py`
(C++) execute it. This room computes nothing: it only says what is to be computed, how large the tensors are, and what
work an operation costs. Read next: `decoder.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cutaway.config import ModelConfig
from cutaway.errors import UnsupportedError

__all__ = ["ATTRIBUTES", "Attribute", "Batch", "Op", "Program", "TopLogits", "refuse_unknown"]

Attribute = bool | int | float | str | None

# What an operation of a kind may be told beyond its inputs and weights, and what holds where it is told nothing.
ATTRIBUTES: dict[str, dict[str, Attribute]] = {
    "attention": {"window": None, "softcap": None, "scale": None},
}


class Batch(Protocol):
    """What a forward pass is given: one step's tokens, as flat arrays (`engine/sequence.py` builds it).

    The new tokens of all sequences lie one after another; there is no padding. Sequence `s` owns tokens
    `query_starts[s]:query_starts[s + 1]`, at consecutive positions that end at `context_lengths[s] - 1`.
    """

    token_ids: np.ndarray  # int32 [num_tokens]
    positions: np.ndarray  # int32 [num_tokens]
    slots: np.ndarray  # int32 [num_tokens]: block * block_size + offset, where the token's key and value go
    query_starts: np.ndarray  # int32 [num_seqs + 1]
    context_lengths: np.ndarray  # int32 [num_seqs]: tokens in the KV cache once this step has stored its own
    block_tables: np.ndarray  # int32 [num_seqs, max_blocks]; entries past a sequence's last block are -1
    output_rows: np.ndarray  # int32 [num_outputs]: the tokens whose logits are wanted
    head_top_k: int | None  # None: all logits; k: only the k largest of each row, exactly (see TopLogits)


@dataclass(frozen=True)
class TopLogits:
    """The k largest logits of each output row: the same values a full head gives, ties by lowest id.

    `ids` int32 and `values` float32, both [num_outputs, k], by falling value, then by rising id.
    """

    ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Op:
    """One operation. `name` is also the name of the tensor it makes.

    `kind` is one of:
      embed, rms_norm, linear, head_norm (RMSNorm of each head), rope, attention (stores k and v in the KV cache of
      `layer`, then attends), silu_mul (silu(a) * b), add, select_rows (keep `output_rows`).
    `rows` is the symbolic first dimension, "num_tokens" or "num_outputs"; `width` the second.
    `weights` are names of weights: (weight,) or (weight, bias) for linear.
    `module` is the Hugging Face module path that makes the same tensor, or "" where none does.
    `attributes` are (name, value) pairs by rising name, only those that differ from `ATTRIBUTES`: see `attribute`.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    rows: str
    width: int
    layer: int | None
    module: str
    attributes: tuple[tuple[str, Attribute], ...] = ()

    def attribute(self, name: str) -> Any:
        """The value of an attribute of this kind of operation. Raises KeyError for one that the kind does not have."""
        default = ATTRIBUTES.get(self.kind, {})[name]
        return dict(self.attributes).get(name, default)

    def shape(self, num_tokens: int, num_outputs: int) -> tuple[int, int]:
        """Shape of the tensor this operation makes in a step of that many tokens and output rows."""
        return (num_tokens if self.rows == "num_tokens" else num_outputs, self.width)


class Program:
    """A forward pass: `ops` in order of execution, and the config it was written for.

    The builder methods (`linear`, `rope`, ...) append an operation and give back the name of its tensor.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.ops: list[Op] = []
        self.weight_shapes: dict[str, tuple[int, ...]] = {}
        self._index: dict[str, int] = {}
        self._layer: int | None = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Op:
        return self.ops[self._index[name]]

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def names(self) -> list[str]:
        return [op.name for op in self.ops]

    def flops(self, op: Op, positions: Sequence[int] | np.ndarray, num_outputs: int) -> int:
        """Floating-point operations of `op` (a multiply-add counts as two) in a step that computes `positions`."""
        rows, width = op.shape(len(positions), num_outputs)
        if op.kind == "linear":
            return 2 * rows * width * self.weight_shapes[op.weights[0]][1]
        if op.kind == "attention":  # q.k and p.v: head_dim multiply-adds each, for every query head and visible key
            window = op.attribute("window")
            pairs = sum(min(int(p) + 1, window or int(p) + 1) for p in positions)
            return 4 * pairs * self.config.num_heads * self.config.head_dim
        per_value = {"rms_norm": 4, "head_norm": 4, "rope": 3, "silu_mul": 5, "add": 1}
        return rows * width * per_value.get(op.kind, 0)

    def kv_tokens(self, op: Op, positions: Sequence[int] | np.ndarray) -> int:
        """Tokens whose keys and values `op` reads or writes in the KV cache, for one sequence at `positions`."""
        if op.kind != "attention" or not len(positions):
            return 0
        window = op.attribute("window")
        unseen = 0 if window is None else max(0, int(positions[0]) + 1 - window)
        return int(positions[-1]) + 1 - unseen + len(positions)

    # -- writing ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Names written inside get the prefix `layers.{index}.`"""
        self._layer = index
        yield
        self._layer = None

    def _name(self, name: str) -> str:
        return name if self._layer is None else f"layers.{self._layer}.{name}"

    def _append(self, name: str, kind: str, inputs: tuple[str, ...], width: int, **more: Any) -> str:
        name = self._name(name)
        if name in self._index:
            raise ValueError(f"two operations named {name}")
        rows = more.pop("rows", None) or (self[inputs[0]].rows if inputs else "num_tokens")
        weights: tuple[str, ...] = tuple(self._name(w) for w in more.pop("weights", ()))
        module: str = more.pop("module", "")
        told: dict[str, Attribute] = more.pop("attributes", {})
        attributes = tuple(sorted((key, value) for key, value in told.items() if value != ATTRIBUTES[kind][key]))
        if module and self._layer is not None:
            module = f"model.layers.{self._layer}.{module}".rstrip(".")  # "." is the layer itself
        self._index[name] = len(self.ops)
        self.ops.append(Op(name, kind, inputs, weights, rows, width, self._layer, module, attributes))
        return name

    def _weight(self, name: str, *shape: int) -> str:
        self.weight_shapes[self._name(name)] = shape
        return name

    def embed(self, name: str, module: str) -> str:
        """token ids [num_tokens] -> rows of the embedding table [num_tokens, hidden]"""
        config = self.config
        weight = self._weight(f"{name}.weight", config.vocab, config.hidden)
        return self._append(name, "embed", (), config.hidden, weights=(weight,), module=module)

    def rms_norm(self, name: str, x: str, module: str) -> str:
        """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension"""
        width = self[x].width
        weight = self._weight(f"{name}.weight", width)
        return self._append(name, "rms_norm", (x,), width, weights=(weight,), module=module)

    def head_norm(self, name: str, x: str, module: str) -> str:
        """RMSNorm over each head's head_dim values, one weight [head_dim] for all heads (Qwen3)"""
        weight = self._weight(f"{name}.weight", self.config.head_dim)
        return self._append(name, "head_norm", (x,), self[x].width, weights=(weight,), module=module)

    def linear(self, name: str, x: str, width: int, module: str, bias: bool = False, weight: str | None = None) -> str:
        """y = x W^T + b; W is [width, width of x]"""
        names = [self._weight(weight or f"{name}.weight", width, self[x].width)]
        if bias:
            names.append(self._weight(f"{name}.bias", width))
        return self._append(name, "linear", (x,), width, weights=tuple(names), module=module)

    def rope(self, name: str, x: str) -> str:
        """Rotate each head's pairs (i, i + head_dim/2) by the token's position"""
        return self._append(name, "rope", (x,), self[x].width)

    def attention(
        self,
        name: str,
        q: str,
        k: str,
        v: str,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> str:
        """Store k and v at the tokens' slots, then softmax(scale q k^T) v over the positions up to the token's own.

        `scale`: None is 1 / sqrt(head_dim). `window`: only the last so many positions, the own among them. `softcap`:
        a score s becomes softcap * tanh(s / softcap) before the softmax.
        """
        told = {"window": window, "softcap": softcap, "scale": scale}
        for key, value in told.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{self._name(name)}: {key} is {value}, expected more than 0")
        return self._append(name, "attention", (q, k, v), self[q].width, attributes=told)

    def silu_mul(self, name: str, gate: str, up: str) -> str:
        """gate / (1 + exp(-gate)) * up"""
        return self._append(name, "silu_mul", (gate, up), self[gate].width, module="")

    def add(self, name: str, a: str, b: str, module: str = "") -> str:
        """a + b"""
        return self._append(name, "add", (a, b), self[a].width, module=module)

    def select_rows(self, name: str, x: str) -> str:
        """Keep only the rows named by the batch's `output_rows`"""
        return self._append(name, "select_rows", (x,), self[x].width, rows="num_outputs")


def refuse_unknown(
    program: Program, interpreter: str, known: Mapping[str, Mapping[str, tuple[Attribute, ...]]]
) -> None:
    """Raises UnsupportedError for an operation whose kind, or whose attribute, an interpreter does not know.

    `known` gives, for each kind, the attributes and their values; of an attribute with an empty tuple any value goes.
    """
    for op in program:
        if op.kind not in known:
            raise UnsupportedError(f"{interpreter} knows no such operation", found=f"{op.kind} ({op.name})")
        for name, value in op.attributes:
            values = known[op.kind].get(name)
            if values is None or (values and value not in values):
                raise UnsupportedError(
                    f"{interpreter} cannot compute {op.kind} ({op.name}) with this {name}",
                    found=repr(value),
                    expected=" or ".join(map(repr, values)) if values else f"no {name}",
                )
