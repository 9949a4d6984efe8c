"""Numbers as text, and axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.render.numbers import Axis, number, size, span


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (12288, "12 KiB"),
        (402653184, "384 MiB"),
        (2 * 24 * 14 * 64 * 2 * 32768, "2.625 GiB"),
        (6528, "6.375 KiB"),
        (2**50, "1,024 TiB"),
    ],
)
def test_sizes_are_binary_and_say_so(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("value", "format", "text"),
    [
        (None, "", "–"),
        (math.nan, ".3f", "–"),
        (math.inf, "", "∞"),
        (True, "", "yes"),
        (1234567, "", "1,234,567"),
        (151645, "id", "151645"),
        (0.00123456, "", "0.001235"),
        (0.5, "percent", "50 %"),
        (0.9999, "percent", "99.99 %"),
        (0.0000025, "seconds", "2.5 µs"),
        (0.25, "seconds", "250 ms"),
        (2.0, "seconds", "2 s"),
        (0.123456, ".3f", "0.123"),
        ("text", "bytes", "text"),
    ],
)
def test_formats(value: object, format: str, text: str) -> None:
    assert number(value, format) == text  # type: ignore[arg-type]


@given(
    st.floats(-1e12, 1e12),
    st.floats(1e-9, 1e12),
    st.integers(2, 9),
    st.sampled_from(["", "bytes"]),
)
def test_a_linear_axis_covers_its_range_in_a_few_even_steps(low: float, width: float, count: int, format: str) -> None:
    high = low + max(width, abs(low) * 1e-9)
    axis = Axis.over(low, high, count=count, format=format)
    room = (high - low) * 1e-6
    assert axis.low <= low + room
    assert axis.high >= high - room
    assert 2 <= len(axis.ticks) <= count + 3
    steps = [b - a for a, b in zip(axis.ticks, axis.ticks[1:], strict=False)]
    assert max(steps) - min(steps) <= max(steps) * 1e-3
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == 1


@given(st.floats(1e-12, 1e12), st.floats(1.0, 1e9), st.sampled_from(["", "bytes"]))
def test_a_log_axis_covers_its_range(low: float, factor: float, format: str) -> None:
    if format == "bytes":
        low += 1
    axis = Axis.over(low, low * max(factor, 1.001), log=True, format=format)
    assert axis.low <= low * 1.000001
    assert axis.high >= low * factor * 0.999999
    assert list(axis.ticks) == sorted(set(axis.ticks))


def test_what_is_counted_has_whole_ticks() -> None:
    assert Axis.over(0, 1, whole=True).ticks == (0, 1)
    assert Axis.over(0, 23, whole=True).ticks == (0, 5, 10, 15, 20, 25)
    assert all(t == int(t) for high in range(1, 60) for t in Axis.over(0, high, whole=True).ticks)
    assert Axis.over(0, 1).ticks == (0, 0.2, 0.4, 0.6000000000000001, 0.8, 1)


def test_a_range_is_never_empty() -> None:
    assert span([]) == (0.0, 1.0)
    assert span([math.nan, None]) == (0.0, 1.0)
    low, high = span([5.0, 5.0])
    assert low < 5 < high
    assert span([3.0, 7.0], zero=True) == (0.0, 7.0)
    assert span([0.0, -1.0, 10.0, 100.0], log=True) == (10.0, 100.0)
