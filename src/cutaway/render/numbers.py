"""Numbers as text, and the scales and ticks of axes: shared by every backend, knows none of them.

Sizes are binary and say so (KiB, MiB, GiB). Read next: `svg.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cutaway.render.document import Cell, Column

__all__ = ["DASH", "Axis", "column_of", "drawable", "finite", "is_number", "number", "size", "span", "whole_numbers"]

DASH = "–"


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite(values: Sequence[float | None]) -> list[float]:
    """The values that can be drawn."""
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def drawable(*values: float | None) -> bool:
    """Whether every one of them is a finite number."""
    return len(finite(values)) == len(values)


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number of one or more: `12 KiB`, `2.625 GiB`."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    text = f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
    return f"{text} {unit}"


def _duration(seconds: float) -> str:
    magnitude = abs(seconds)
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if magnitude < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if magnitude < 1000 else f"{seconds:,.0f} s"


def _general(value: float) -> str:
    magnitude = abs(value)
    if value == int(value) and magnitude < 1e15:
        return f"{int(value):,}"
    if 1000 <= magnitude < 1e15:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text


def number(value: Cell, format: str = "") -> str:
    """A cell as text, by the formats of `document.py`."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return DASH if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if format == "bytes":
        return size(value)
    if format == "seconds":
        return _duration(value)
    if format == "percent":
        return f"{100 * value:.3g} %" if abs(value) < 0.9995 else f"{100 * value:.4g} %"
    if format == "id":
        return str(value)
    return value.__format__(format) if format else _general(value)


def column_of(column: Column | str) -> Column:
    return Column(column) if isinstance(column, str) else column


def span(values: Sequence[float | None], log: bool = False, zero: bool = False) -> tuple[float, float]:
    """The range an axis must cover; never empty. On a log axis only positive values count."""
    drawn = [v for v in finite(values) if not log or v > 0]
    if not drawn:
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = min(drawn), max(drawn)
    if zero and not log:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return (low / 2, high * 2) if log else (low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5))
    return low, high


def _nice(step: float, powers_of_two: bool) -> float:
    """The smallest pleasant step that is at least `step`."""
    if powers_of_two:
        return float(2 ** math.ceil(math.log2(step)))
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * (1 - 1e-9))


def whole_numbers(values: Sequence[float]) -> bool:
    """Whether all are whole: layers and tokens are counted, and have no halves between them."""
    return all(float(v).is_integer() for v in values)


@dataclass(frozen=True)
class Axis:
    """A scale from `low` to `high` and its ticks. `place(value)` is 0 at `low` and 1 at `high`."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(
        cls, low: float, high: float, log: bool = False, count: int = 5, format: str = "", whole: bool = False
    ) -> Axis:
        """An axis that covers [low, high] and begins and ends on ticks; `whole` puts them on whole numbers only."""
        if log:
            low, high = max(low, 1e-300), max(high, 1e-300)
            if format == "bytes":  # powers of two, so that every tick is a round number of KiB, MiB or GiB
                first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
                every = max(1, math.ceil((last - first) / count))
                ticks = tuple(2.0**e for e in range(first, last + every, every))
                return cls(ticks[0], ticks[-1], True, ticks)
            first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
            if last - first >= 2:
                every = max(1, math.ceil((last - first) / count))
                ticks = tuple(10.0**e for e in range(first, last + every, every))
            else:  # under two decades: 1, 2, 5
                marks = [m * 10.0**e for e in range(first - 1, last + 2) for m in (1, 2, 5)]
                below = max(m for m in marks if m <= low * (1 + 1e-9))
                above = min(m for m in marks if m >= high * (1 - 1e-9))
                ticks = tuple(m for m in marks if below <= m <= above)
            return cls(ticks[0], ticks[-1], True, ticks)
        step = _nice((high - low) / max(count, 1), format == "bytes" and high >= 1024)
        step = max(math.ceil(step), 1) if whole else step
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(i * step for i in range(first, last + 1))
        return cls(ticks[0], ticks[-1], False, ticks)

    def place(self, value: float) -> float:
        if self.log:
            value, low, high = math.log(max(value, 1e-300)), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low) if high > low else 0.5

    def share(self, value: float | None) -> float | None:
        """`place`, kept within 0 and 1; None where there is no number. Infinities stand at the ends."""
        if value is None or math.isnan(value):
            return None
        return min(max(self.place(value), 0.0), 1.0)
