"""Weights as the bytes of a file: random ones, and groups filled with any byte. What the kernels are tried on."""

from __future__ import annotations

import functools

import numpy as np

from cutaway import _native, quant

ISAS = _native.isas()
THREADS = (1, 2, 5)
FLOATS = ("F32", "F16", "BF16")
QUANTISED = tuple(name for name in quant.FORMATS if name not in FLOATS)
SCALES_AT = {  # where a group holds its float16 fields: the scale, and the minimum where there is one
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


@functools.cache
def pool(threads: int) -> _native.Pool:
    return _native.Pool(threads)


def with_scales(format: str, data: np.ndarray, *scales: np.ndarray | float) -> np.ndarray:
    """The same groups with other scales (and minimums); `scales` are broadcast over [rows, groups]."""
    f = quant.FORMATS[format]
    groups = data.reshape(len(data), -1, f.group_bytes).copy()
    for at, scale in zip(SCALES_AT[format], scales, strict=False):
        halves = np.broadcast_to(np.asarray(scale, "<f2"), groups.shape[:2])
        groups[:, :, at : at + 2] = np.ascontiguousarray(halves)[..., None].view(np.uint8)
    return groups.reshape(len(data), -1)


def random_bytes(format: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Any bits at all, the scales among them: subnormal, negative, infinite, NaN."""
    return rng.integers(0, 256, (rows, quant.FORMATS[format].row_bytes(columns)), dtype=np.uint8)


def random_rows(format: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Values of about 1: any codes, scales of either sign."""
    if format in FLOATS:
        return quant.quantize(format, rng.normal(0, 1, (rows, columns)).astype(np.float32))
    data = random_bytes(format, rows, columns, rng)
    shape = (rows, columns // quant.FORMATS[format].group)
    unit = np.abs(quant.dequantize(format, with_scales(format, data, 1.0, 0.0))).mean()
    signs = rng.choice([-1.0, 1.0], shape)
    return with_scales(format, data, signs * rng.uniform(0.5, 1.5, shape) / unit, rng.uniform(-0.2, 0.2, shape))


def filled(format: str, rows: int, columns: int, byte: int, scale: float = 1.0, minimum: float = 1.0) -> np.ndarray:
    """Every byte of codes (and of a super-group's inner scales) the same."""
    data = np.full((rows, quant.FORMATS[format].row_bytes(columns)), byte, np.uint8)
    return with_scales(format, data, scale, minimum)


def products_and_minimums(format: str, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w = product + minimum, float64 [rows, columns] each: scale times code, and what does not depend on the code."""
    if format in FLOATS or len(SCALES_AT[format]) == 1:
        values = quant.dequantize(format, data).astype(np.float64)
        return values, np.zeros_like(values)
    halves = data.reshape(len(data), -1, quant.FORMATS[format].group_bytes)[:, :, SCALES_AT[format][0] :][:, :, :4]
    d, m = np.moveaxis(np.ascontiguousarray(halves).view("<f2"), -1, 0)
    products = quant.dequantize(format, with_scales(format, data, d, 0.0))
    minimums = quant.dequantize(format, with_scales(format, data, 0.0, m))
    return products.astype(np.float64), minimums.astype(np.float64)


def pack(format: str, data: np.ndarray, columns: int, threads: int = 1) -> _native.Packed:
    return _native.pack(format, data, columns, pool(threads))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the last bit; -0.0 is not 0.0."""
    assert a.dtype == b.dtype == np.float32
    return a.shape == b.shape and a.tobytes() == b.tobytes()
