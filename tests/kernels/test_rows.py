"""Kernels that work along a row: norms, activations, sums, rounding to int8; of any length, down to none."""

from __future__ import annotations

import numpy as np
import pytest
from raw import ISAS, same_bits
from tolerances import RMS_NORM_RELATIVE, SILU_OF_PRODUCT, SILU_RELATIVE, SUBNORMAL

from cutaway import _native, quant

LENGTHS = (*range(18), 31, 32, 33, 63, 64, 65, 896, 1000, 4097)

every_isa = pytest.mark.parametrize("isa", ISAS)


def row(kernel: str, a: np.ndarray, b: np.ndarray, isa: str, eps: float = 1e-6) -> np.ndarray:
    return _native.row_kernel(kernel, a, b, eps, isa)


def values(n: int, seed: int, spread: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)


@every_isa
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_rms_norm(isa, eps):
    for n in LENGTHS:
        for spread in (1e-12, 1e-3, 1.0, 1e15):  # squares of 1e-24 and 1e30 have their place in float64
            x, weight = values(n, n, spread), values(n, n + 1)
            x64 = x.astype(np.float64)
            expected = x64 / np.sqrt((x64**2).sum() / max(n, 1) + np.float64(np.float32(eps))) * weight
            found = row("rms_norm", x, weight, isa, eps)
            assert (np.abs(found - expected) <= RMS_NORM_RELATIVE * np.abs(expected) + 1e-44).all(), f"{n} values"


@every_isa
def test_rms_norm_of_zeros_and_of_one_large_value(isa):
    for n in LENGTHS[1:]:
        weight = values(n, n)
        assert (row("rms_norm", np.zeros(n, np.float32), weight, isa) == 0).all()
        for at in {0, n // 2, n - 1}:
            x = np.zeros(n, np.float32)
            x[at] = 1e20
            found = row("rms_norm", x, weight, isa)
            assert found[at] == pytest.approx(np.sqrt(n) * weight[at], rel=RMS_NORM_RELATIVE)
            assert (np.delete(found, at) == 0).all()


def assert_silu(gate: np.ndarray, up: np.ndarray, isa: str) -> None:
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * u
    allowed = SILU_RELATIVE * np.abs(expected) + SILU_OF_PRODUCT * np.abs(g * u) + SUBNORMAL
    assert (np.abs(row("silu_mul", gate, up, isa) - expected) <= allowed).all(), f"{len(gate)} values"


@every_isa
def test_silu_mul(isa):
    for n in LENGTHS:
        gate, up = values(n, n, 8.0), values(n, n + 1)
        gate[: n // 4] *= 30  # past the ends of exp
        assert_silu(gate, up, isa)
    gate = np.linspace(-100, 100, 20001, dtype=np.float32)
    assert_silu(gate, np.ones_like(gate), isa)


@every_isa
def test_silu_mul_of_extremes(isa):
    gate = np.array([0, -0.0, 1e-45, -1e-45, 88, -88, 104, -104, 1e30, -1e30, 3e38, -3e38], np.float32)
    assert_silu(gate, np.ones_like(gate), isa)
    found = row(
        "silu_mul", np.array([np.inf, np.nan, 1, 1], np.float32), np.array([1, 1, np.inf, np.nan], np.float32), isa
    )
    assert found[[0, 2]].tolist() == [np.inf, np.inf]
    assert np.isnan(found[[1, 3]]).all()


@every_isa
def test_add(isa):
    for n in LENGTHS:
        a, b = values(n, n), values(n, n + 1, 1e6)
        assert same_bits(row("add", a, b, isa), a + b)


@every_isa
@pytest.mark.parametrize("kernel", ["silu_mul", "add"])
def test_a_value_is_the_same_bits_wherever_it_stands(kernel, isa):
    a, b = values(65, 1, 5.0), values(65, 2)
    whole = row(kernel, a, b, isa)
    for begin in range(9):
        for end in range(begin, 66, 7):
            assert same_bits(row(kernel, a[begin:end], b[begin:end], isa), whole[begin:end])


def test_what_only_adds_and_multiplies_is_the_same_bits_everywhere():
    for n in LENGTHS:
        a, b = values(n, n), values(n, n + 1)
        for kernel in ("rms_norm", "add"):
            first, *others = (row(kernel, a, b, isa) for isa in ISAS)
            assert all(same_bits(other, first) for other in others)


# -- int8 activations ------------------------------------------------------------------------------------------------


def assert_rounded(x: np.ndarray, isa: str) -> None:
    codes, scales = _native.quantize(x, isa)
    expected_codes, expected_scales = quant.quantize_activations(x)
    assert np.array_equal(codes, expected_codes)
    assert same_bits(scales, expected_scales)


@every_isa
def test_int8_activations_are_the_definition_to_the_bit(isa):
    rng = np.random.default_rng(0)
    for columns in (32, 64, 96, 896, 4864):
        for spread in (1e-30, 1e-3, 1.0, 1e6, 1e30):
            assert_rounded(rng.normal(0, spread, (5, columns)).astype(np.float32), isa)
    assert _native.quantize(np.ones((0, 64), np.float32), isa)[0].shape == (0, 64)


@every_isa
def test_int8_activations_round_half_to_even(isa):
    x = np.full((1, 96), 0.5, np.float32) + np.arange(96, dtype=np.float32) - 48
    x[0, ::32] = 127  # the scale is 1
    codes, scales = _native.quantize(x, isa)
    assert (scales == 1).all()
    assert codes[0, 1:8].tolist() == [-46, -46, -44, -44, -42, -42, -40]
    assert_rounded(x, isa)


@every_isa
def test_int8_activations_next_to_a_tie(isa):
    """Values that a factor rounded otherwise would give another code: half-way between two, and their neighbours."""
    rng = np.random.default_rng(9)
    largest = rng.uniform(0.5, 2, 400).astype(np.float32)
    codes = rng.integers(-126, 126, (400, 31)) + 0.5
    middle = (codes * largest[:, None] / 127).astype(np.float32)
    for x in (middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))):
        assert_rounded(np.concatenate([largest[:, None], x], axis=1), isa)


@every_isa
def test_int8_activations_at_the_ends_of_float32(isa):
    smallest, largest = 2.0**-149, np.finfo(np.float32).max
    for size in (0.0, smallest, 1e-42, 2.0**-126, 3.7e-37, 3.8e-37, 1e-30, largest / 2, largest):
        x = np.full((2, 64), size, np.float32)
        x[1, ::3] *= -1
        x[1, 1::3] = 0
        assert_rounded(x, isa)
    for at in range(32):  # each place counts for the largest value
        for sign in (1, -1):
            x = np.ones((1, 32), np.float32)
            x[0, at] = sign * 127
            assert_rounded(x, isa)


@every_isa
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_int8_activations_that_are_not_finite_show_in_the_scale(isa, value):
    for at in range(32):
        x = np.ones((1, 96), np.float32)
        x[0, 32 + at] = value
        codes, scales = _native.quantize(x, isa)
        assert np.isfinite(scales[0]).tolist() == [True, False, True]
        assert (np.abs(codes[0, :32]) == 127).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError):
        _native.quantize(np.ones((1, 33), np.float32), "")
    with pytest.raises(ValueError):
        _native.row_kernel("add", np.ones(3, np.float32), np.ones(4, np.float32))
    with pytest.raises(ValueError):
        _native.row_kernel("subtract", np.ones(3, np.float32), np.ones(3, np.float32))
