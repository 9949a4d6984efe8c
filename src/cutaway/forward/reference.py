"""The NumPy interpreter: the definition of every operation of a Program, one function each with its formula.

Read it to learn what a decoder computes; the tests hold every faster interpreter to it. It is written for the eye, not
for speed: nothing is fused, nothing is blocked. It opens no file and knows no engine; the KV cache it is handed is
only arrays with a layout (see `KVArrays`). Read next: `native.py`, the same Program at speed.

T = num_tokens, R = num_outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from cutaway import quant
from cutaway.config import ModelConfig
from cutaway.errors import KernelError
from cutaway.forward.program import ATTRIBUTES, Batch, Op, Program, TopLogits, refuse_unknown
from cutaway.forward.rope import rope_tables
from cutaway.forward.taps import Taps

__all__ = ["KVArrays", "ReferenceProgram"]

FLOAT_FORMATS = frozenset({"F32", "F16", "BF16"})
KV_GROUP = 32  # values of one token's head that share a scale in a q8_0 KV cache
ROWS_AT_ONCE_BYTES = 64 << 20  # a weight that is not kept is dequantised this much at a time


class KVArrays(Protocol):
    """The KV cache as an interpreter sees it: one array a layer for keys, one for values.

    k[layer] [num_blocks, num_kv_heads, head_dim, block_size]: a key's values lie block_size apart;
    v[layer] [num_blocks, num_kv_heads, block_size, head_dim].
    Type "f16" or "f32": the values. Type "q8_0": int8 codes, with float16 scales for each 32 values along head_dim in
    k_scale[layer] [num_blocks, num_kv_heads, head_dim / 32, block_size] and
    v_scale[layer] [num_blocks, num_kv_heads, block_size, head_dim / 32].
    """

    block_size: int
    k_type: str
    v_type: str
    k: list[np.ndarray]
    v: list[np.ndarray]
    k_scale: list[np.ndarray]
    v_scale: list[np.ndarray]


class ReferenceProgram:
    """Runs a Program with NumPy.

    `activations`: "f32" multiplies dequantised weights by activations as they are; "int8" first rounds the
    activations to int8 in groups where the weight is quantised (see `linear`). `dtype`: numpy.float64 makes every
    operation, and the logits, float64: the yardstick that float32 interpreters are measured by.
    `keep_bytes`: dequantised weights are kept for the next step as long as they fit; the others are dequantised at
    each use, so that a large model needs no large memory.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, quant.Weight],
        activations: str = "f32",
        *,
        dtype: Any = np.float32,
        keep_bytes: int = 256 << 20,
    ) -> None:
        if activations not in ("f32", "int8"):
            raise KernelError("activations", found=repr(activations), expected="'f32' or 'int8'")
        refuse_unknown(program, "the reference", {k: dict.fromkeys(ATTRIBUTES.get(k, ()), ()) for k in _KINDS})
        for name, shape in program.weight_shapes.items():
            found = weights[name].shape if name in weights else "no such weight"
            if found != shape:
                raise KernelError(f"weight {name}", found=found, expected=shape)
        self.program, self.weights, self.activations = program, weights, activations
        self._dtype = np.dtype(dtype)
        self._keep_bytes = keep_bytes
        self._kept: dict[str, np.ndarray] = {}
        self._tables = rope_tables(program.config, 0)
        self._last_use = {name: index for index, op in enumerate(program) for name in op.inputs}

    def run(self, batch: Batch, kv_cache: KVArrays, taps: Taps | None = None) -> np.ndarray | TopLogits:
        """One step: store the batch's keys and values in `kv_cache`, give the logits of its output rows.

        Shapes: logits [R, vocab]; with `batch.head_top_k` = k a TopLogits of [R, k].
        """
        tapped = taps.names if taps is not None else frozenset()
        if taps is not None:
            taps.begin(batch)
        tensors: dict[str, np.ndarray] = {}
        for index, op in enumerate(self.program):
            inputs = [tensors[name] for name in op.inputs]
            tensor = _KINDS[op.kind](self, op, inputs, batch, kv_cache)
            if taps is not None and op.name in tapped:
                replacement = taps.visit(op.name, tensor)
                tensor = tensor if replacement is None else replacement.astype(self._dtype)
            tensors[op.name] = tensor
            for name in op.inputs:  # the last reader has read it
                if self._last_use[name] == index:
                    tensors.pop(name, None)
        logits = tensors[self.program.names[-1]]  # [R, vocab]
        return logits if batch.head_top_k is None else largest(logits, batch.head_top_k)

    # -- one method a kind: gather what the operation needs, then call its definition below ---------------------------

    def _embed(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        weight = self.weights[op.weights[0]]
        rows = quant.dequantize(weight.format, weight.data[batch.token_ids])  # only the rows that are looked up
        return rows.astype(self._dtype)  # [T, hidden]

    def _rms_norm(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        return rms_norm(inputs[0], self._values(op.weights[0]), self.program.config.rms_norm_eps)

    def _linear(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        x, weight = inputs[0], self.weights[op.weights[0]]
        if self.activations == "int8" and weight.format not in FLOAT_FORMATS and len(x):
            x = round_activations(x)
        bias = self._values(op.weights[1]) if len(op.weights) > 1 else None
        size_bytes = op.width * x.shape[1] * self._dtype.itemsize
        if op.weights[0] in self._kept or size_bytes <= self._keep_bytes - self._kept_bytes:
            return linear(x, self._values(op.weights[0]), bias)
        y = np.empty((len(x), op.width), dtype=self._dtype)
        rows_at_once = max(1, ROWS_AT_ONCE_BYTES // (x.shape[1] * self._dtype.itemsize))
        for first in range(0, op.width, rows_at_once):
            rows = slice(first, first + rows_at_once)
            values = quant.dequantize(weight.format, weight.data[rows]).astype(self._dtype, copy=False)
            y[:, rows] = linear(x, values, None if bias is None else bias[rows])
        return y  # [T, width]

    def _head_norm(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        return head_norm(inputs[0], self._values(op.weights[0]), self.program.config.rms_norm_eps)

    def _rope(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        needed = int(batch.positions.max(initial=-1)) + 1
        if needed > len(self._tables[0]):
            self._tables = rope_tables(self.program.config, max(needed, 2 * len(self._tables[0])))
        cos, sin = self._tables
        return rope(inputs[0], cos[batch.positions], sin[batch.positions])

    def _attention(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        q, k, v = inputs
        assert op.layer is not None
        store(kv_cache, op.layer, batch.slots, k, v, self.program.config)
        told = {name: op.attribute(name) for name in ("window", "softcap", "scale")}
        return attention(q, kv_cache, op.layer, batch, self.program.config, **told)

    def _silu_mul(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        return silu_mul(inputs[0], inputs[1])

    def _add(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        return inputs[0] + inputs[1]

    def _select_rows(self, op: Op, inputs: list[np.ndarray], batch: Batch, kv_cache: KVArrays) -> np.ndarray:
        return inputs[0][batch.output_rows]  # [R, hidden]

    def _values(self, name: str) -> np.ndarray:
        """A weight dequantised, kept for the next time where it fits."""
        if name not in self._kept:
            values = self.weights[name].dequantize().astype(self._dtype, copy=False)
            if values.nbytes > self._keep_bytes - self._kept_bytes:
                return values
            self._kept[name] = values
        return self._kept[name]

    @property
    def _kept_bytes(self) -> int:
        return sum(values.nbytes for values in self._kept.values())


Step = Callable[[ReferenceProgram, Op, list[np.ndarray], Batch, KVArrays], np.ndarray]
_KINDS: dict[str, Step] = {
    "embed": ReferenceProgram._embed,
    "rms_norm": ReferenceProgram._rms_norm,
    "linear": ReferenceProgram._linear,
    "head_norm": ReferenceProgram._head_norm,
    "rope": ReferenceProgram._rope,
    "attention": ReferenceProgram._attention,
    "silu_mul": ReferenceProgram._silu_mul,
    "add": ReferenceProgram._add,
    "select_rows": ReferenceProgram._select_rows,
}

# -- the definitions -------------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """y = x / sqrt(mean(x^2) + eps) * weight: each row brought to length sqrt(width), then stretched by the weight.

    Shapes: x [T, width], weight [width] -> [T, width].
    Source: arXiv:1910.07467.
    """
    mean_square = np.mean(x * x, axis=-1, keepdims=True)  # [T, 1]
    return x / np.sqrt(mean_square + x.dtype.type(eps)) * weight  # [T, width]


def head_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm of each head by itself, one weight for all heads.

    Shapes: x [T, heads * head_dim], weight [head_dim] -> [T, heads * head_dim].
    Source: Qwen3 arXiv:2505.09388.
    """
    heads = x.reshape(len(x), -1, len(weight))  # [T, heads, head_dim]
    return rms_norm(heads, weight, eps).reshape(x.shape)  # [T, heads * head_dim]


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """y = x W^T + b: each output is the dot product of a row of x with a row of W.

    Shapes: x [T, in], weight [out, in], bias [out] -> [T, out].
    Numerics: with int8 activations x has gone through `round_activations`. For a group g of activations with scale
    s_g and codes c that gives sum_g s_g * sum_{k in g} W[k] * c[k]; a kernel computes the inner sum in integers
    from W's own codes and multiplies by the scales after, which is the same number up to float32 rounding.
    """
    y = x @ weight.T  # [T, out]
    return y if bias is None else y + bias


def round_activations(x: np.ndarray) -> np.ndarray:
    """What int8 leaves of activations: each group becomes code * scale, codes in -127..127.

    Shapes: [T, in] -> [T, in].
    """
    codes, scales = quant.quantize_activations(x.astype(np.float32, copy=False))
    groups = codes.reshape(*scales.shape, -1) * scales[..., None].astype(x.dtype)  # [T, in / group, group]
    return groups.reshape(x.shape)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn each head's pair (a, b) = (x[i], x[i + head_dim / 2]) by the token's angle i:
    (a cos - b sin, b cos + a sin).

    The dot product of two turned vectors depends on the difference of their positions only.
    Shapes: x [T, heads * head_dim], cos and sin [T, head_dim / 2] -> [T, heads * head_dim].
    Source: arXiv:2104.09864; pairs as halves of a head, the Hugging Face convention of these models.
    """
    half = cos.shape[1]
    heads = x.reshape(len(x), -1, 2 * half)  # [T, heads, head_dim]
    a, b = heads[..., :half], heads[..., half:]  # [T, heads, head_dim / 2] each
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, head_dim / 2]: the same for all heads
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def store(kv_cache: KVArrays, layer: int, slots: np.ndarray, k: np.ndarray, v: np.ndarray, config: ModelConfig) -> None:
    """Write each token's key and value where its slot says, rounded to the KV cache's type.

    Shapes: k and v [T, num_kv_heads * head_dim]; slots [T], slot = block * block_size + offset.
    """
    blocks, offsets = np.divmod(slots, kv_cache.block_size)  # [T] each
    heads = (len(slots), config.num_kv_heads, config.head_dim)
    keys, values = k.reshape(heads), v.reshape(heads)  # [T, num_kv_heads, head_dim]
    if kv_cache.k_type == "q8_0":
        keys, scales = quantize_kv(keys)
        kv_cache.k_scale[layer][blocks, :, :, offsets] = scales
    if kv_cache.v_type == "q8_0":
        values, scales = quantize_kv(values)
        kv_cache.v_scale[layer][blocks, :, offsets, :] = scales
    kv_cache.k[layer][blocks, :, :, offsets] = keys
    kv_cache.v[layer][blocks, :, offsets, :] = values


def quantize_kv(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q8_0 for the KV cache: scale = float16(max |x| / 127) of each 32 values, code = x / scale rounded half to even.

    Shapes: [T, num_kv_heads, head_dim] -> int8 codes of that shape, float16 scales [T, num_kv_heads, head_dim / 32].
    """
    groups = x.astype(np.float32).reshape(*x.shape[:2], -1, KV_GROUP)
    scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
    divisors = scales.astype(np.float32)[..., None]
    codes = np.rint(np.divide(groups, divisors, out=np.zeros_like(groups), where=divisors > 0))
    return np.clip(codes, -127, 127).astype(np.int8).reshape(x.shape), scales


def keys_and_values(
    kv_cache: KVArrays, layer: int, block_table: np.ndarray, length: int, dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Read back positions 0 to length - 1 of one sequence through its block table.

    Shapes: block_table [max_blocks] -> keys [num_kv_heads, head_dim, length], values [num_kv_heads, length, head_dim].
    """
    blocks = block_table[: -(-length // kv_cache.block_size)]  # the blocks that hold those positions
    k, v = kv_cache.k[layer][blocks].astype(dtype), kv_cache.v[layer][blocks].astype(dtype)
    if kv_cache.k_type == "q8_0":
        k *= np.repeat(kv_cache.k_scale[layer][blocks].astype(dtype), KV_GROUP, axis=2)
    if kv_cache.v_type == "q8_0":
        v *= np.repeat(kv_cache.v_scale[layer][blocks].astype(dtype), KV_GROUP, axis=3)
    heads, head_dim = k.shape[1:3]
    k = k.transpose(1, 2, 0, 3).reshape(heads, head_dim, -1)  # [num_kv_heads, head_dim, blocks * block_size]
    v = v.transpose(1, 0, 2, 3).reshape(heads, -1, head_dim)  # [num_kv_heads, blocks * block_size, head_dim]
    return k[:, :, :length], v[:, :length]


def attention(
    q: np.ndarray,
    kv_cache: KVArrays,
    layer: int,
    batch: Batch,
    config: ModelConfig,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """out = softmax(q k^T / sqrt(head_dim)) v, over the positions up to the token's own, for each sequence by itself.

    Grouped-query attention: `num_heads / num_kv_heads` neighbouring query heads read the same key/value head.
    `scale` stands for 1 / sqrt(head_dim); `softcap` bends every score s to softcap * tanh(s / softcap); with `window`
    a token sees only the last so many positions, its own among them.
    Shapes: q [T, num_heads * head_dim] -> [T, num_heads * head_dim].
    Source: arXiv:1706.03762; grouped queries arXiv:2305.13245; windows arXiv:2310.06825; soft caps arXiv:2408.00118.
    """
    out = np.empty_like(q)  # [T, num_heads * head_dim]
    for sequence, length in enumerate(batch.context_lengths):
        own = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
        table = batch.block_tables[sequence]
        keys, values = keys_and_values(kv_cache, layer, table, int(length), q.dtype)
        queries = q[own].reshape(-1, config.num_kv_heads, config.group, config.head_dim)
        queries = queries.transpose(1, 2, 0, 3)  # [num_kv_heads, group, n, head_dim]
        scores = queries @ keys[:, None]  # [num_kv_heads, group, n, length]
        scores = scores / q.dtype.type(np.sqrt(config.head_dim)) if scale is None else scores * q.dtype.type(scale)
        if softcap is not None:
            scores = np.tanh(scores / q.dtype.type(softcap)) * q.dtype.type(softcap)
        distance = batch.positions[own][:, None] - np.arange(length)  # [n, length]: 0 is the token itself
        unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mixed = softmax(np.where(unseen, -np.inf, scores)) @ values[:, None]  # [num_kv_heads, group, n, head_dim]
        out[own] = mixed.transpose(2, 0, 1, 3).reshape(-1, q.shape[1])  # [n, num_heads * head_dim]
    return out


def softmax(scores: np.ndarray) -> np.ndarray:
    """exp(s) / sum(exp(s)) over the last dimension; the largest score is subtracted first, so nothing overflows."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def silu_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate / (1 + exp(-gate)) * up.

    Shapes: [T, intermediate] twice -> [T, intermediate].
    Source: SwiGLU arXiv:2002.05202.
    """
    with np.errstate(over="ignore"):  # exp(-gate) = inf makes the quotient 0, as it should be
        return gate / (1 + np.exp(-gate)) * up


def largest(logits: np.ndarray, k: int) -> TopLogits:
    """The k largest logits of each row, by falling value; of equal ones the lowest id first.

    Shapes: [R, vocab] -> ids int32 and values float32 [R, k].
    Raises: KernelError if k is not in 1..vocab.
    """
    if not 1 <= k <= logits.shape[1]:
        raise KernelError("head_top_k", found=k, expected=f"1 to {logits.shape[1]}")
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]  # stable: equal logits stay in order of id
    values = np.take_along_axis(logits, ids, axis=1)
    return TopLogits(ids.astype(np.int32), values.astype(np.float32))
