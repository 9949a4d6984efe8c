"""Matrix products: what they are, and that a row of them is the same bits however it is computed.

The definition is `w` dequantised times `x` (or what int8 leaves of it), summed in float64. Sums of quantised formats
have one float32 order on every instruction set with fused multiply-add, so those agree to the bit; scalar code rounds
a product before it adds it.
"""

from __future__ import annotations

import numpy as np
import pytest
from raw import FLOATS, ISAS, QUANTISED, THREADS, filled, pack, pool, products_and_minimums, random_rows, same_bits
from tolerances import float_product, int8_product

from cutaway import _native, quant

NUM_TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257)  # around tiles of 2, 4 and 8, and blocks of 256
A_FEW = (1, 5, 11)  # one token; a handful; tiles and what they leave over: three ways through the kernels
ROWS = (1, 7, 8, 9, 16, 17, 31)
GROUPS_OF_32 = (1, 2, 3, 28, 29, 57)  # strips hold 28 groups
GROUPS_OF_256 = (1, 2, 3, 4, 8)
COLUMNS_OF_FLOATS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65)
CASES = [(f, a) for f in quant.FORMATS for a in (("f32",) if f in FLOATS else ("int8", "f32"))]

every_isa = pytest.mark.parametrize("isa", ISAS)
every_case = pytest.mark.parametrize(("format", "activations"), CASES)


def widths(format: str) -> list[int]:
    if format in FLOATS:
        return list(COLUMNS_OF_FLOATS)
    return [quant.FORMATS[format].group * n for n in (GROUPS_OF_256 if format.endswith("_K") else GROUPS_OF_32)]


def activations_of(num_tokens: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of different size, some values far larger than their neighbours."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (num_tokens, columns)) * 10.0 ** rng.uniform(-3, 3, (num_tokens, 1))
    return np.where(rng.random(x.shape) < 0.02, 30 * x, x).astype(np.float32)


def multiply(w, x, isa, activations, threads=1, **added) -> np.ndarray:
    return _native.matmul(w, x, isa, activations == "int8", pool(threads), **added)


def definition(format: str, data: np.ndarray, x: np.ndarray, activations: str) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far a kernel's may be off, [num_tokens, rows] each."""
    products, minimums = products_and_minimums(format, data)
    num_groups = -(-x.shape[1] // 32)
    if activations == "f32":
        w, x64 = quant.dequantize(format, data).astype(np.float64), x.astype(np.float64)
        return x64 @ w.T, float_product(num_groups) * (np.abs(x64) @ np.abs(w).T)
    codes, scales = quant.quantize_activations(x)
    halves = codes.reshape(len(x), -1, 2, 16).astype(np.float64)  # minimums are added by 16 columns in Q2_K
    by_code = np.einsum("rghk,tghk->trg", products.reshape(len(data), -1, 2, 16), halves, optimize=True)
    by_minimum = np.einsum("rghk,tghk->trgh", minimums.reshape(len(data), -1, 2, 16), halves, optimize=True)
    scales = scales.astype(np.float64)[:, None, :]
    value = (scales * (by_code + by_minimum.sum(-1))).sum(-1)
    size = (scales * (np.abs(by_code) + np.abs(by_minimum).sum(-1))).sum(-1)
    return value, int8_product(num_groups) * size


def assert_is(found: np.ndarray, defined: tuple[np.ndarray, np.ndarray]) -> None:
    value, allowed = defined
    assert found.dtype == np.float32
    assert found.shape == value.shape
    worst = np.abs(found - value) - allowed
    assert (worst <= 0).all(), f"off by {np.abs(found - value).max()}, {(worst > 0).mean():.1%} out of bounds"


@every_isa
@every_case
def test_the_product_is_the_definition(format, activations, isa):
    rng = np.random.default_rng(1)
    for columns in widths(format):
        for rows in ROWS:
            data, x = random_rows(format, rows, columns, rng), activations_of(max(A_FEW), columns, rows)
            w = pack(format, data, columns)
            whole = multiply(w, x, isa, activations)
            assert_is(whole, definition(format, data, x, activations))
            for num_tokens in A_FEW:
                assert same_bits(multiply(w, x[:num_tokens], isa, activations), whole[:num_tokens])


@every_isa
@every_case
def test_a_token_is_the_same_bits_in_any_batch_on_any_threads(format, activations, isa):
    rng = np.random.default_rng(2)
    for rows, columns in ((17, widths(format)[1]), (9, widths(format)[-2])):
        data, x = random_rows(format, rows, columns, rng), activations_of(max(NUM_TOKENS), columns)
        w = pack(format, data, columns)
        whole = multiply(w, x, isa, activations)
        assert_is(whole, definition(format, data, x, activations))
        for num_tokens in NUM_TOKENS:
            for threads in THREADS:
                part = multiply(w, x[:num_tokens], isa, activations, threads)
                assert same_bits(part, whole[:num_tokens]), f"{num_tokens} tokens, {threads} threads"
        for token in range(len(x)):
            alone = multiply(w, x[token : token + 1], isa, activations)
            assert same_bits(alone, whole[token : token + 1]), f"token {token} alone"
        assert same_bits(multiply(w, x[::-1].copy(), isa, activations), whole[::-1].copy())


@every_isa
@every_case
def test_a_row_is_the_same_bits_among_any_rows(format, activations, isa):
    """Alone in its panel, in another lane, beside rows that are infinite."""
    columns = widths(format)[2]
    data, x = random_rows(format, 17, columns, np.random.default_rng(3)), activations_of(max(A_FEW), columns)
    whole = multiply(pack(format, data, columns), x, isa, activations)
    for row in range(17):
        w = pack(format, data[row : row + 1], columns)
        for num_tokens in A_FEW:
            alone = multiply(w, x[:num_tokens], isa, activations)
            assert same_bits(alone, whole[:num_tokens, row : row + 1].copy())
    infinite = np.full((3, columns), np.inf, np.float32)
    infinite = quant.quantize(format, infinite) if format in FLOATS else filled(format, 3, columns, 0x77, np.inf)
    moved = multiply(pack(format, np.concatenate([infinite, data]), columns), x, isa, activations)
    assert same_bits(moved[:, 3:].copy(), whole)


@every_case
def test_instruction_sets_with_the_same_float_order_give_the_same_bits(format, activations):
    if not {"avx2", "avx512vnni"} <= set(ISAS):
        pytest.skip("this processor has one of them at most")
    for columns in widths(format):
        data, x = random_rows(format, 17, columns, np.random.default_rng(4)), activations_of(max(A_FEW), columns)
        w = pack(format, data, columns)
        for num_tokens in A_FEW:
            two = [multiply(w, x[:num_tokens], isa, activations) for isa in ("avx2", "avx512vnni")]
            assert same_bits(*two), f"{columns} columns, {num_tokens} tokens"


@every_isa
@pytest.mark.parametrize("format", QUANTISED)
def test_gate_and_up_in_one_product_are_the_same_bits(format, isa):
    rng, columns = np.random.default_rng(3), widths(format)[2]
    for rows in ROWS:
        gate, up = (pack(format, random_rows(format, rows, columns, rng), columns) for _ in range(2))
        biases = rng.normal(0, 1, (2, rows)).astype(np.float32)
        for tokens in (9, 10, 65):
            x = activations_of(tokens, columns)
            for bias, up_bias in ((None, None), biases):
                apart = (multiply(w, x, isa, "int8", bias=b) for w, b in ((gate, bias), (up, up_bias)))
                expected = np.stack(
                    [_native.row_kernel("silu_mul", *row, 0.0, isa) for row in zip(*apart, strict=True)]
                )
                for threads in THREADS:
                    together = multiply(gate, x, isa, "int8", threads, bias=bias, up=up, up_bias=up_bias)
                    assert same_bits(together, expected), f"{rows} rows, {tokens} tokens, {threads} threads"


@every_isa
@every_case
def test_bias_and_residual_are_added_in_float32_afterwards(format, activations, isa):
    columns, rng = widths(format)[0], np.random.default_rng(5)
    for rows in (1, 8, 17):
        w, x = pack(format, random_rows(format, rows, columns, rng), columns), activations_of(max(A_FEW), columns)
        bias = rng.normal(0, 1, rows).astype(np.float32)
        residual = rng.normal(0, 1, (max(A_FEW), rows)).astype(np.float32)
        for num_tokens in A_FEW:
            plain = multiply(w, x[:num_tokens], isa, activations)
            r = residual[:num_tokens]
            for threads in THREADS:
                assert same_bits(multiply(w, x[:num_tokens], isa, activations, threads, bias=bias), plain + bias)
                assert same_bits(multiply(w, x[:num_tokens], isa, activations, threads, residual=r), r + plain)
                both = multiply(w, x[:num_tokens], isa, activations, threads, bias=bias, residual=r)
                assert same_bits(both, r + (plain + bias))


PATTERNS = {
    "+127": np.full(32, 127),
    "-127": np.full(32, -127),
    "by turns": np.where(np.arange(32) % 2, 127, -127),
    "by halves": np.where(np.arange(32) < 16, 127, -127),
    "pairs": np.where(np.arange(32) % 4 < 2, 127, -127),
    "one": np.where(np.arange(32) == 31, 127, 0),
    "none": np.zeros(32),
}


@every_isa
@pytest.mark.parametrize("format", QUANTISED)
def test_the_largest_codes_by_the_largest_activations_are_exact(format, isa):
    """With scales of 1 everything is a whole number: no sum of int16 products may have run over."""
    columns = widths(format)[1]
    tiled = [np.tile(pattern, columns // 32) for pattern in PATTERNS.values()]
    x = np.array(tiled * 3, np.float32)
    for byte in range(256):
        for scale in (1.0, -1.0):
            data = filled(format, 1, columns, byte, scale)
            value, _ = definition(format, data, x, "int8")
            w = pack(format, np.repeat(data, 25, axis=0), columns)  # two panels, one, and a row
            for num_tokens in (1, 4, 8, len(x)):
                found = multiply(w, x[:num_tokens], isa, "int8")
                assert np.array_equal(found, np.repeat(value[:num_tokens], 25, axis=1)), f"byte {byte:#x}"


@every_isa
@every_case
def test_activations_of_zero_give_zero(format, activations, isa):
    columns = widths(format)[2]
    w = pack(format, random_rows(format, 9, columns, np.random.default_rng(6)), columns)
    for num_tokens in A_FEW:
        assert (multiply(w, np.zeros((num_tokens, columns), np.float32), isa, activations) == 0).all()


@every_isa
@every_case
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_activation_that_is_not_finite_is_never_hidden(format, activations, isa, value):
    """Wherever it stands: all of its token's results are not finite, and no other token's."""
    columns = widths(format)[2]
    w = pack(format, random_rows(format, 9, columns, np.random.default_rng(7)), columns)
    x = activations_of(9, columns)
    clean = multiply(w, x, isa, activations)
    for at in range(min(columns, 32)):
        broken = x.copy()
        broken[1, at] = value
        found = multiply(w, broken, isa, activations)
        assert not np.isfinite(found[1]).any(), f"column {at}"
        assert same_bits(np.delete(found, 1, axis=0), np.delete(clean, 1, axis=0))
        for begin, end in ((1, 2), (0, 3)):
            assert not np.isfinite(multiply(w, broken[begin:end], isa, activations)[1 - begin]).any()


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_no_rows_and_no_tokens(activations):
    w = pack("Q8_0", np.zeros((0, 34), np.uint8), 32)
    assert multiply(w, np.ones((3, 32), np.float32), "", activations).shape == (3, 0)
    w = pack("Q8_0", np.zeros((5, 34), np.uint8), 32)
    assert multiply(w, np.ones((0, 32), np.float32), "", activations).shape == (0, 5)


def test_what_does_not_fit_is_refused():
    small, other = (pack("Q8_0", random_rows("Q8_0", 8, 32 * n, np.random.default_rng(0)), 32 * n) for n in (1, 2))
    for tokens, up in ((9, other), (8, small)):
        with pytest.raises(ValueError, match="up"):
            multiply(small, np.zeros((tokens, 32), np.float32), ISAS[0], "int8", up=up)
    w, x = pack("Q8_0", np.zeros((5, 34), np.uint8), 32), np.ones((3, 32), np.float32)
    for bad, added in (
        (np.ones((3, 31), np.float32), {}),
        (x, {"bias": np.ones(4, np.float32)}),
        (x, {"residual": np.ones((2, 5), np.float32)}),
        (x, {"residual": np.ones((3, 4), np.float32)}),
    ):
        with pytest.raises(ValueError):
            multiply(w, bad, "", "int8", **added)
    with pytest.raises(ValueError):
        multiply(w, x, "mmx", "int8")
