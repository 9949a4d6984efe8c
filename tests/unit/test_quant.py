"""quant.py: group layouts, rounding, and the int8 activations, against values worked out by hand."""

import numpy as np
import pytest

from cutaway.quant import FORMATS, Weight, bf16_to_f32, dequantize, f32_to_bf16, quantize, quantize_activations

ERROR_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}


def f16(value):
    return np.array([value], "<f2").tobytes()


def group(*fields):
    return np.frombuffer(b"".join(fields), np.uint8)[None]


def test_bits_a_weight():
    assert {name: FORMATS[name].bits for name in ("F32", "Q4_0", "Q8_0", "Q4_K", "Q6_K")} == {
        "F32": 32,
        "Q4_0": 4.5,
        "Q8_0": 8.5,
        "Q4_K": 4.5,
        "Q6_K": 6.5625,
    }


def test_q4_0_takes_low_nibbles_first():
    values = dequantize("Q4_0", group(f16(0.5), bytes([0x0F + 16 * j for j in range(16)])))[0]
    assert values[:16].tolist() == [3.5] * 16
    assert values[16:].tolist() == [0.5 * (j - 8) for j in range(16)]


def test_q4_1_adds_the_minimum():
    values = dequantize("Q4_1", group(f16(0.5), f16(-3), bytes([0x21] * 16)))[0]
    assert values.tolist() == [-2.5] * 16 + [-2.0] * 16


def test_q5_0_fifth_bit_of_value_i_is_bit_i():
    values = dequantize("Q5_0", group(f16(1), (1 << 5 | 1 << 20).to_bytes(4, "little"), bytes(16)))[0]
    assert np.flatnonzero(values == 0).tolist() == [5, 20]
    assert set(values.tolist()) == {0.0, -16.0}


def test_q8_0():
    codes = np.arange(-16, 16, dtype=np.int8)
    assert dequantize("Q8_0", group(f16(2), codes.tobytes()))[0].tolist() == (codes * 2.0).tolist()


def test_q2_k_scales_and_minimums_are_nibbles_of_one_byte():
    scales = bytes([0x21] + [0] * 14 + [0x03])  # values 0-15: scale 1, minimum 2; values 240-255: scale 3
    values = dequantize("Q2_K", group(scales, bytes([0b11100100] * 64), f16(1), f16(0.5)))[0]
    assert values[:16].tolist() == [0 - 1.0] * 16  # bits 0-1 hold 0
    assert values[16:240].tolist() == [0.0] * 224
    assert values[240:].tolist() == [9.0] * 16  # bits 6-7 hold 3


def test_q4_k_six_bit_scales():
    """Scale 63 for all eight, minimum 33 for the last four only: their upper two bits lie in bytes 4-7."""
    packed = bytes([0xFF] * 4 + [0b10_000000] * 4 + [0x1F] * 4)
    values = dequantize("Q4_K", group(f16(1), f16(1), packed, bytes([0x21] * 128)))[0].reshape(4, 2, 32)
    expected = np.array([[63.0, 126.0]] * 2 + [[63.0 - 33, 126.0 - 33]] * 2)
    assert np.array_equal(values, np.broadcast_to(expected[:, :, None], (4, 2, 32)))


def test_q6_k_scales_are_signed():
    scales = np.full(16, -2, np.int8)
    values = dequantize("Q6_K", group(bytes(128), bytes(64), scales.tobytes(), f16(0.25)))[0]
    assert values.tolist() == [0.25 * -2 * -32] * 256


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_are_decoded_alike_alone_and_together(name):
    f = FORMATS[name]
    data = np.random.default_rng(0).integers(0, 100, (5, 4096 // f.group * f.group_bytes), dtype=np.uint8)
    big = np.tile(data, (80, 1))  # more than one slice of rows
    assert np.array_equal(dequantize(name, big), np.tile(dequantize(name, data), (80, 1)), equal_nan=True)


def test_a_row_must_be_whole_groups():
    with pytest.raises(ValueError, match="no whole number of Q8_0 groups"):
        dequantize("Q8_0", np.zeros((2, 35), np.uint8))
    with pytest.raises(ValueError, match="cannot quantise"):
        quantize("Q8_0", np.zeros((2, 33), np.float32))
    with pytest.raises(ValueError, match="cannot quantise"):
        quantize("Q4_K", np.zeros((2, 256), np.float32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_formats_round_trip(name):
    x = np.float32([[0.0, -0.0, 1.0, -2.5, 240.0, 0.125]])
    back = dequantize(name, quantize(name, x))
    assert back.tobytes() == x.tobytes()


@pytest.mark.parametrize("name", sorted(ERROR_BITS))
def test_quantising_is_off_by_half_a_step_at_most(name):
    x = np.random.default_rng(1).normal(0, 1, (50, 128)).astype(np.float32)
    groups = x.reshape(-1, 32)
    levels = 2 ** ERROR_BITS[name]
    reach = np.abs(groups).max(1) * 2 if name.endswith("0") else np.ptp(groups, axis=1)
    step = reach / (levels - 1 if name.endswith("1") or name == "Q8_0" else levels)
    error = np.abs(dequantize(name, quantize(name, x)).reshape(-1, 32) - groups)
    # The code furthest from the extreme is clipped in Q4_0 and Q5_0: one whole step; float16 scales cost a little.
    allowed = (1.0 if name in ("Q4_0", "Q5_0") else 0.5) * step + 1e-3 * np.abs(groups).max(1)
    assert (error <= allowed[:, None]).all()
    assert error.max() > 0.2 * step.min()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_zeros_stay_zero(name):
    assert dequantize(name, quantize(name, np.zeros((1, 64), np.float32))).tolist() == [[0.0] * 64]


def test_activations():
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -2.5]  # scale 1: ties go to the even code
    x[1, 32:34] = [-254, 3.0]
    codes, scales = quantize_activations(x)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (np.int8, (2, 64), np.float32, (2, 2))
    assert codes[0, :4].tolist() == [127, 0, 2, -2]
    assert codes[1, 32:34].tolist() == [-127, 2]
    assert scales.tolist() == [[1, 0], [0, 2]]


def test_activation_scales_are_not_rounded_to_float16():
    x = np.full((1, 32), 0.1, np.float32)
    assert quantize_activations(x)[1][0, 0] == np.float32(0.1) / np.float32(127)
    assert quantize_activations(x * np.float32(1e-39))[0].tolist() == [[0] * 32]  # 127 / amax is not finite


def test_bf16_rounds_to_even_and_is_never_made_infinite_by_loading():
    assert f32_to_bf16(np.float32([1.00390625, 1.01171875])).tolist() == [0x3F80, 0x3F82]
    assert bf16_to_f32(np.uint16([0x4789])).tolist() == [70144.0]  # past the largest float16
    x = np.float32([1.0, -0.0, 3e38, 1e-40])
    bits = f32_to_bf16(x)
    assert np.array_equal(f32_to_bf16(bf16_to_f32(bits)), bits)
    assert np.signbit(bf16_to_f32(bits)[1])
    assert np.isfinite(bf16_to_f32(bits)).all()
    assert bf16_to_f32(bits)[3] != 0  # a subnormal stays


def test_weight():
    weight = Weight("w", "Q8_0", (3, 64), quantize("Q8_0", np.ones((3, 64), np.float32)))
    assert (weight.nbytes, weight.params) == (3 * 68, 192)
    assert np.allclose(weight.dequantize(), np.ones((3, 64)), rtol=1e-3)


def test_no_activations_quantise_to_no_codes():
    codes, scales = quantize_activations(np.zeros((0, 64), np.float32))
    assert codes.shape == (0, 64)
    assert scales.shape == (0, 2)
