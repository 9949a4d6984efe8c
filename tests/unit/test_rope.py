"""The tables of rotary cosines and sines."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny import LLAMA3, TINY, YARN
from tolerances import EPS32

from cutaway.config import RopeScaling
from cutaway.errors import UnsupportedError
from cutaway.forward.rope import attention_factor, inverse_frequencies, rope_tables


def test_tables_are_cosines_and_sines_of_position_times_frequency():
    cos, sin = rope_tables(TINY, 50)
    assert cos.shape == sin.shape == (50, 8)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.flags.c_contiguous
    assert sin.flags.c_contiguous
    for position, pair in ((0, 0), (1, 0), (1, 3), (49, 7), (33, 1)):
        angle = position * 10000.0 ** (-2 * pair / 16)
        assert cos[position, pair] == pytest.approx(math.cos(angle), abs=angle * EPS32 + EPS32)
        assert sin[position, pair] == pytest.approx(math.sin(angle), abs=angle * EPS32 + EPS32)


def test_the_angle_is_rounded_to_float32_before_its_cosine_is_taken():
    cos, _ = rope_tables(TINY, 4001)
    angle = np.float32(4000) * inverse_frequencies(TINY)[1]
    assert angle.dtype == np.float32
    assert cos[4000, 1] == np.float32(math.cos(float(angle)))
    assert cos[4000, 1] != np.float32(math.cos(4000 * 10000.0 ** (-2 / 16)))


def test_more_positions_leave_the_first_ones_as_they_are():
    few, many = rope_tables(TINY, 10), rope_tables(TINY, 1000)
    assert np.array_equal(few[0], many[0][:10])
    assert np.array_equal(few[1], many[1][:10])


def test_linear_divides_every_frequency():
    config = replace(TINY, rope_scaling=RopeScaling("linear", 4.0))
    assert np.array_equal(inverse_frequencies(config), inverse_frequencies(TINY) / 4)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_blends_between():
    plain = inverse_frequencies(TINY)
    scaled = inverse_frequencies(replace(TINY, rope_scaling=LLAMA3))
    turns = 64 * plain / (2 * math.pi)
    assert (turns > 4).any()
    assert (turns < 1).any()
    assert ((turns > 1) & (turns < 4)).any()
    np.testing.assert_array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_array_equal(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


def test_frequency_factors_are_divisors():
    factors = tuple(float(i + 1) for i in range(8))
    for kind in ("none", "llama3"):
        config = replace(TINY, rope_scaling=RopeScaling(kind, frequency_factors=factors))
        assert np.array_equal(inverse_frequencies(config), inverse_frequencies(TINY) / np.float32(factors))


def test_yarn_keeps_the_fast_end_and_divides_the_slow_end():
    config = replace(TINY, head_dim=64, rope_scaling=YARN)
    plain, scaled = inverse_frequencies(replace(config, rope_scaling=RopeScaling())), inverse_frequencies(config)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4, rel=4 * EPS32)
    assert (np.diff(scaled / plain) <= EPS32).all()


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (RopeScaling("linear", 4.0), 1.0),
        (RopeScaling("yarn", 1.0), 1.0),
        (RopeScaling("yarn", 4.0), 0.1 * math.log(4) + 1),
        (RopeScaling("yarn", 4.0, attention_factor=1.5), 1.5),
        (RopeScaling("yarn", 4.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (RopeScaling("yarn", 4.0, mscale=1.0, mscale_all_dim=0.0), 0.1 * math.log(4) + 1),
        (RopeScaling("yarn", 4.0, mscale=0.5, mscale_all_dim=1.0), (0.05 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ],
)
def test_attention_factor(scaling, expected):
    assert attention_factor(scaling) == pytest.approx(expected, rel=1e-12)
    cos, sin = rope_tables(replace(TINY, rope_scaling=replace(scaling, original_max_context=64)), 3)
    assert np.allclose(np.hypot(cos, sin), expected, rtol=4 * EPS32)


def test_an_unknown_scaling_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="longrope"):
        rope_tables(replace(TINY, rope_scaling=RopeScaling("longrope")), 1)
