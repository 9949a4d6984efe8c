"""Panels hold a file's weights without loss: what comes out of them is what `quant.dequantize` says, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from raw import FLOATS, ISAS, QUANTISED, SCALES_AT, THREADS, filled, pack, pool, random_bytes

from cutaway import _native, quant

ROWS = range(1, 18)  # to two panels and a row
COLUMNS_OF_FLOATS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65)
SCALES = (1.0, -1.0, 0.0, -0.0, 65504.0, -65504.0, 2.0**-14, 2.0**-24, -(2.0**-24), np.inf, -np.inf, np.nan)
WIDENED_BYTES = {"Q4_K": 4, "Q5_K": 4, "Q2_K": 80, "Q3_K": 36}  # what a group of 256 takes more in a panel

every_isa = pytest.mark.parametrize("isa", ISAS)


def assert_lossless(format: str, data: np.ndarray, columns: int, isa: str, threads: int = 1) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        expected = quant.dequantize(format, data)
    found = _native.unpack(pack(format, data, columns, threads), isa)
    assert np.array_equal(found, expected, equal_nan=True)
    if format in FLOATS or len(SCALES_AT[format]) == 1:  # 0 - minimum may lose the sign of a zero
        signed = ~np.isnan(expected)
        assert np.array_equal(np.signbit(found)[signed], np.signbit(expected)[signed])


@every_isa
@pytest.mark.parametrize("format", QUANTISED)
def test_any_bits_come_back(format, isa):
    rng = np.random.default_rng(len(format))
    for rows, groups in itertools.product(ROWS, (1, 2, 3)):
        columns = groups * quant.FORMATS[format].group
        assert_lossless(format, random_bytes(format, rows, columns, rng), columns, isa)


@every_isa
@pytest.mark.parametrize("format", FLOATS)
def test_any_bits_of_floats_come_back_at_any_width(format, isa):
    rng = np.random.default_rng(5)
    for rows, columns in itertools.product(ROWS, COLUMNS_OF_FLOATS):
        assert_lossless(format, random_bytes(format, rows, columns, rng), columns, isa)


@every_isa
@pytest.mark.parametrize("format", QUANTISED)
def test_groups_of_one_byte_come_back(format, isa):
    """All codes 0, all the largest, all -128, all 127, ..."""
    columns = quant.FORMATS[format].group
    for byte in range(256):
        assert_lossless(format, filled(format, 9, columns, byte, 0.5, -0.25), columns, isa)


@every_isa
@pytest.mark.parametrize("format", QUANTISED)
def test_scales_at_the_ends_of_float16_come_back(format, isa):
    columns = 2 * quant.FORMATS[format].group
    for byte, scale, minimum in itertools.product((0x00, 0xFF, 0x5A), SCALES, SCALES):
        assert_lossless(format, filled(format, 9, columns, byte, scale, minimum), columns, isa)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("format", quant.FORMATS)
def test_any_number_of_threads_packs(format, threads):
    columns = 3 * max(32, quant.FORMATS[format].group)
    for rows in (1, 16, 81):
        assert_lossless(format, random_bytes(format, rows, columns, np.random.default_rng(rows)), columns, "", threads)


@pytest.mark.parametrize("format", quant.FORMATS)
def test_matrices_share_an_arena_without_touching_each_other(format):
    rng = np.random.default_rng(3)
    columns = max(32, quant.FORMATS[format].group)
    parts = [random_bytes(format, rows, columns, rng) for rows in (3, 8, 17)]
    arena = _native.Arena(sum(_native.packed_bytes(format, len(part), columns) for part in parts))
    packed = [_native.pack(format, part, columns, pool(2), False, arena) for part in parts]
    for part, matrix in zip(parts, packed, strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            expected = quant.dequantize(format, part)
        assert np.array_equal(_native.unpack(matrix, ""), expected, equal_nan=True)
    with pytest.raises(MemoryError):
        _native.pack(format, parts[0], columns, pool(1), False, arena)


@pytest.mark.parametrize("format", quant.FORMATS)
def test_panels_are_as_large_as_the_file(format):
    groups = 3
    columns = groups * max(32, quant.FORMATS[format].group)
    data = np.zeros((24, quant.FORMATS[format].row_bytes(columns)), np.uint8)
    assert pack(format, data, columns).nbytes == data.nbytes + 24 * groups * WIDENED_BYTES.get(format, 0)


def test_what_cannot_be_packed_is_refused():
    for format, columns, row_bytes in (
        ("Q4_0", 33, 18),  # not whole groups
        ("Q4_K", 128, 72),
        ("Q4_0", 64, 18),  # not the bytes of that width
        ("F32", 3, 8),
        ("F32", 0, 0),
        ("IQ4_NL", 32, 18),  # no kernel
    ):
        with pytest.raises(ValueError):
            _native.pack(format, np.zeros((2, row_bytes), np.uint8), columns, pool(1))
    assert _native.packed_bytes("IQ4_NL", 2, 32) == 0
    with pytest.raises(ValueError):
        _native.unpack(pack("F32", np.zeros((2, 12), np.uint8), 3), "mmx")
