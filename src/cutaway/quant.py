"""The weight formats: the layout of a group, how it is dequantised, how values are quantised (NumPy).

This is the definition of every format; the C++ kernels are tested against it. A row of a weight is a whole number
of groups, one after another; a group is a struct of little-endian fields without padding, and each decoder below
names the fields it splits its group into. `d` is always the scale of a group and `m` its minimum, both float16.

The room knows nothing of files or models. Read next: `forward/reference.py`, which computes with these weights.

Source: the GGUF/GGML quantisation formats (ggml `ggml-common.h`, MIT); bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

__all__ = [
    "FORMATS",
    "Format",
    "Weight",
    "bf16_to_f32",
    "dequantize",
    "f32_to_bf16",
    "quantize",
    "quantize_activations",
]

ACTIVATION_GROUP = 32  # activations that share one scale


@dataclass(frozen=True)
class Format:
    """A weight format: `group` values take `group_bytes` bytes in the file."""

    name: str
    group: int
    group_bytes: int

    @property
    def bits(self) -> float:
        """Bits a weight, scales included."""
        return 8 * self.group_bytes / self.group

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; `columns` must be a multiple of `group`."""
        return columns // self.group * self.group_bytes


FORMATS = {
    f.name: f
    for f in (
        Format("F32", 1, 4),
        Format("F16", 1, 2),
        Format("BF16", 1, 2),
        Format("Q4_0", 32, 18),
        Format("Q4_1", 32, 20),
        Format("Q5_0", 32, 22),
        Format("Q5_1", 32, 24),
        Format("Q8_0", 32, 34),
        Format("Q2_K", 256, 84),
        Format("Q3_K", 256, 110),
        Format("Q4_K", 256, 144),
        Format("Q5_K", 256, 176),
        Format("Q6_K", 256, 210),
    )
}


@dataclass
class Weight:
    """One named weight as its file holds it.

    `data`: uint8 [rows, row_bytes], usually a read-only view of a memory map (a vector is one row);
    `shape`: (values,) or (rows, columns).
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def params(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def dequantize(self) -> np.ndarray:
        """All values as float32 of `shape`."""
        return dequantize(self.format, self.data).reshape(self.shape)


# -- bfloat16 ------------------------------------------------------------------------------------------------------


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns -> float32, exact."""
    return bits.astype(np.uint16, copy=False).view(ml_dtypes.bfloat16).astype(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bit patterns, rounded to nearest, ties to even."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


# -- dequantise ----------------------------------------------------------------------------------------------------


def dequantize(format: str, data: np.ndarray) -> np.ndarray:
    """uint8 [rows, row_bytes] -> float32 [rows, columns].

    Rows are decoded in slices, so the temporaries stay a few MiB however large the weight is.
    """
    f = FORMATS[format]
    rows, row_bytes = data.shape
    groups = row_bytes // f.group_bytes
    if groups * f.group_bytes != row_bytes:
        raise ValueError(f"a row of {row_bytes} bytes is no whole number of {format} groups of {f.group_bytes} bytes")
    out = np.empty((rows, groups * f.group), np.float32)
    step = max(1, (1 << 20) // max(1, groups * f.group))
    for start in range(0, rows, step):
        part = np.ascontiguousarray(data[start : start + step])
        out[start : start + step] = _DECODERS[format](part.reshape(-1, f.group_bytes)).reshape(len(part), -1)
    return out


def _f16(fields: np.ndarray) -> np.ndarray:
    """uint8 [groups, 2 n] -> float32 [groups, n]"""
    return np.ascontiguousarray(fields).view("<f2").astype(np.float32)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """uint8 [groups, n] -> uint8 [groups, 2 n]: all low halves, then all high halves."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bits(qh: np.ndarray) -> np.ndarray:
    """uint8 [groups, 4] -> uint8 [groups, 32]: bit i of the group, moved to the place of bit 4."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _bit_pairs(qs: np.ndarray) -> np.ndarray:
    """uint8 [groups, n * 32] -> uint8 [groups, n * 128]: of each 32 bytes bits 0-1, then 2-3, then 4-5, then 6-7."""
    qs = qs.reshape(len(qs), -1, 1, 32)
    return ((qs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3).reshape(len(qs), -1)


def _scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [groups, 12] -> eight 6-bit scales and eight 6-bit minimums, uint8 [groups, 8] each (Q4_K, Q5_K).

    Bytes 0-3 and 4-7 hold the first four of each in their low 6 bits; bytes 8-11 hold the low halves of the last
    four, whose upper 2 bits are the spare bits of bytes 0-7.
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    return scales, mins


def _spread(scales: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales [groups, n] and values [groups, 256] shaped to multiply: [groups, n, 1] and [groups, n, 256 / n]."""
    return scales[:, :, None], values.reshape(*scales.shape, -1)


def _f32_values(g: np.ndarray) -> np.ndarray:
    return g.view("<f4")


def _bf16_values(g: np.ndarray) -> np.ndarray:
    return bf16_to_f32(g.view("<u2"))


def _q4_0(g: np.ndarray) -> np.ndarray:
    """d, 16 bytes of nibbles: x = d (q - 8)"""
    return _f16(g[:, :2]) * (_nibbles(g[:, 2:]).view(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(g: np.ndarray) -> np.ndarray:
    """d, m, 16 bytes of nibbles: x = d q + m"""
    return _f16(g[:, :2]) * _nibbles(g[:, 4:]).astype(np.float32) + _f16(g[:, 2:4])


def _q5_0(g: np.ndarray) -> np.ndarray:
    """d, 32 fifth bits, 16 bytes of nibbles: x = d (q - 16)"""
    q = _nibbles(g[:, 6:]) | _fifth_bits(g[:, 2:6])
    return _f16(g[:, :2]) * (q.view(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(g: np.ndarray) -> np.ndarray:
    """d, m, 32 fifth bits, 16 bytes of nibbles: x = d q + m"""
    q = _nibbles(g[:, 8:]) | _fifth_bits(g[:, 4:8])
    return _f16(g[:, :2]) * q.astype(np.float32) + _f16(g[:, 2:4])


def _q8_0(g: np.ndarray) -> np.ndarray:
    """d, 32 int8: x = d q"""
    return _f16(g[:, :2]) * g[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(g: np.ndarray) -> np.ndarray:
    """16 bytes (scale, minimum) of 4 bits, 64 bytes of bit pairs, d, m: x = (d scale) q - (m minimum)"""
    packed, d, m = g[:, :16], _f16(g[:, 80:82]), _f16(g[:, 82:84])
    scales, q = _spread(d * (packed & 15), _bit_pairs(g[:, 16:80]))
    return scales * q.astype(np.float32) - (m * (packed >> 4))[:, :, None]


def _q3_k(g: np.ndarray) -> np.ndarray:
    """256 third bits (32 bytes, bit j for values 32 j to 32 j + 31), 64 bytes of bit pairs, 12 bytes of sixteen
    6-bit scales, d: x = d (scale - 32) (q - 4)
    """
    third = (g[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [groups, 8, 32]
    q = (_bit_pairs(g[:, 32:96]) | third.reshape(len(g), 256) << 2).view(np.int8) - np.int8(4)
    low = _nibbles(g[:, 96:104])  # the low halves of scales 0-7, then of 8-15
    high = ((g[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3).reshape(len(g), 16)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    scale, q = _spread(_f16(g[:, 108:110]) * scales.astype(np.float32), q)
    return scale * q.astype(np.float32)


def _q4_k(g: np.ndarray) -> np.ndarray:
    """d, m, 12 bytes of scales and minimums, 128 bytes of nibbles (64 values to 32 bytes): as Q2_K"""
    return _scaled_with_minimum(g[:, :16], _nibbles(g[:, 16:].reshape(-1, 4, 32)))


def _q5_k(g: np.ndarray) -> np.ndarray:
    """d, m, 12 bytes of scales and minimums, 256 fifth bits (as the third bits of Q3_K), nibbles: as Q2_K"""
    fifth = (g[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [groups, 8, 32]
    return _scaled_with_minimum(g[:, :16], _nibbles(g[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4)


def _scaled_with_minimum(head: np.ndarray, q: np.ndarray) -> np.ndarray:
    scales, mins = _scales_and_mins(head[:, 4:])
    scale, q = _spread(_f16(head[:, :2]) * scales, q.reshape(len(head), 256))
    return scale * q.astype(np.float32) - (_f16(head[:, 2:4]) * mins)[:, :, None]


def _q6_k(g: np.ndarray) -> np.ndarray:
    """128 bytes of nibbles (128 values to 64 bytes), 64 bytes of upper bit pairs, 16 int8 scales, d:
    x = (d scale) (q - 32)
    """
    low = _nibbles(g[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    q = (low | _bit_pairs(g[:, 128:192]) << 4).view(np.int8) - np.int8(32)
    scale, q = _spread(_f16(g[:, 208:210]) * g[:, 192:208].view(np.int8).astype(np.float32), q)
    return scale * q.astype(np.float32)


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": _f32_values,
    "F16": _f16,
    "BF16": _bf16_values,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# -- quantise ------------------------------------------------------------------------------------------------------


def quantize(format: str, x: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] -> uint8 [rows, row_bytes], for the float formats and the formats of 32 values.

    Raises: ValueError (a K format, or columns that are no whole number of groups).
    """
    f = FORMATS[format]
    x = np.ascontiguousarray(x, np.float32)
    if format not in _ENCODERS or x.shape[-1] % f.group:
        raise ValueError(f"cannot quantise rows of {x.shape[-1]} values to {format}")
    return _ENCODERS[format](x.reshape(-1, f.group)).reshape(len(x), f.row_bytes(x.shape[-1]))


def quantize_activations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations as int8 with one scale to 32 of them: what the integer kernels multiply with.

    a = max |x| of the group; scale = a / 127; code = rint(x * (127 / a)), ties to even; all in float32, the scale is
    not rounded further. Where 127 / a is not finite (a group of zeros, or all below 4e-37) the codes are 0.

    Shapes: x float32 [num_tokens, columns] -> codes int8 [num_tokens, columns], scales float32 [num_tokens,
    columns / 32].
    """
    groups = np.asarray(x, np.float32).reshape(len(x), x.shape[1] // ACTIVATION_GROUP, ACTIVATION_GROUP)
    amax = np.abs(groups).max(axis=-1)
    inverse = _quotient(np.float32(127), amax)
    codes = np.rint(groups * inverse[..., None]).astype(np.int8)
    return codes.reshape(x.shape), amax / np.float32(127)


def _quotient(a: np.ndarray | np.float32, b: np.ndarray) -> np.ndarray:
    """a / b as float32, and 0 where that is not finite"""
    with np.errstate(divide="ignore", over="ignore"):
        quotient = a / b
    return np.where(np.isfinite(quotient), quotient, np.float32(0))


def _to_bytes(scale: np.ndarray) -> np.ndarray:
    """float32 [groups, 1] -> uint8 [groups, 2], rounded to float16"""
    return scale.astype("<f2").view(np.uint8)


def _by_extreme(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and codes of x = d (q - levels / 2): the value furthest from 0 falls on q = 0."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    d = extreme / np.float32(-levels / 2)
    q = np.trunc(x * _quotient(np.float32(1), d) + np.float32(levels / 2 + 0.5))
    return d, q.clip(0, levels - 1).astype(np.uint8)


def _by_range(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, minimum and codes of x = d q + m: the smallest value is q = 0, the largest q = levels - 1."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    d = (high - low) / np.float32(levels - 1)
    q = np.trunc((x - low) * _quotient(np.float32(1), d) + np.float32(0.5))
    return d, low, q.clip(0, levels - 1).astype(np.uint8)


def _pack_nibbles(q: np.ndarray) -> np.ndarray:
    return (q[:, :16] & 15) | (q[:, 16:] & 15) << 4


def _pack_fifth_bits(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> 4, axis=-1, bitorder="little")


def _to_q4_0(x: np.ndarray) -> np.ndarray:
    d, q = _by_extreme(x, 16)
    return np.concatenate([_to_bytes(d), _pack_nibbles(q)], axis=-1)


def _to_q4_1(x: np.ndarray) -> np.ndarray:
    d, m, q = _by_range(x, 16)
    return np.concatenate([_to_bytes(d), _to_bytes(m), _pack_nibbles(q)], axis=-1)


def _to_q5_0(x: np.ndarray) -> np.ndarray:
    d, q = _by_extreme(x, 32)
    return np.concatenate([_to_bytes(d), _pack_fifth_bits(q), _pack_nibbles(q)], axis=-1)


def _to_q5_1(x: np.ndarray) -> np.ndarray:
    d, m, q = _by_range(x, 32)
    return np.concatenate([_to_bytes(d), _to_bytes(m), _pack_fifth_bits(q), _pack_nibbles(q)], axis=-1)


def _to_q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = x * _quotient(np.float32(1), d)
    q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # ties away from zero
    return np.concatenate([_to_bytes(d), q.astype(np.int8).view(np.uint8)], axis=-1)


_ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda x: x.view(np.uint8),
    "F16": lambda x: x.astype("<f2").view(np.uint8),
    "BF16": lambda x: f32_to_bf16(x).view(np.uint8),
    "Q4_0": _to_q4_0,
    "Q4_1": _to_q4_1,
    "Q5_0": _to_q5_0,
    "Q5_1": _to_q5_1,
    "Q8_0": _to_q8_0,
}
