"""Plots as inline SVG: axes, ticks, units and titles, in colours that the page's style sheet sets.

Text is the size it says at the width it is drawn for, so a plot is drawn twice: once for a wide column and once for
a phone. No scripts; what a point says when a pointer rests on it is an SVG `<title>`. Read next: `html.py`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from cutaway.render.document import BarPlot, HeatMap, LinePlot
from cutaway.render.numbers import Axis, drawable, finite, number, span, whole_numbers
from cutaway.render.palette import value_colour
from cutaway.render.plain import shorten, visible

__all__ = ["bar_plot", "escape", "heat_map", "line_plot"]

_FONT = 12.0
_CHAR = 7.4  # width of a character of the page's sans-serif at _FONT, on the generous side
_SHAPES = 7


def escape(text: str) -> str:
    """Text for HTML or SVG, in an element or in a quoted attribute; the parser gives back the same characters."""
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    return (
        html.escape(text, quote=True).replace("\r", "&#13;").replace("\u2028", "&#8232;").replace("\u2029", "&#8233;")
    )


def _width(text: str) -> float:
    return cell_len(text) * _CHAR


def _fitted(text: str, room: float) -> str:
    """As much of a text as has room, by the width of its characters on the page."""
    count, used = 0, 0.0
    while count < len(text) and used + _width(text[count]) <= room:
        used += _width(text[count])
        count += 1
    return shorten(text, count)


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "", turn: float = 0.0) -> str:
    attributes = f' class="{css}"' if css else ""
    if turn:
        attributes += f' transform="rotate({turn:g} {x:.1f} {y:.1f})"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _svg(width: float, height: float, label: str, parts: Sequence[str], css: str = "") -> str:
    return (
        f'<svg class="plot {css}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(label)}">' + "".join(parts) + "</svg>"
    )


def _with_unit(title: str, unit: str) -> str:
    return f"{title} ({unit})" if unit else title


@dataclass(frozen=True)
class _Frame:
    """The rectangle of a plot inside its drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, fraction: float) -> float:
        return self.left + fraction * (self.right - self.left)

    def y(self, fraction: float) -> float:
        return self.bottom - fraction * (self.bottom - self.top)


def _x_ticks(frame: _Frame, axis: Axis, format: str, title: str, grid: bool) -> list[str]:
    """Ticks below the frame (those that would touch are left out) and the axis title."""
    parts, free = [], -1e9
    for tick in axis.ticks:
        x, text = frame.x(axis.place(tick)), number(tick, format)
        if grid:
            parts.append(_line(x, frame.top, x, frame.bottom, "grid"))
        half = _width(text) / 2
        if x - half > free:
            parts += [_line(x, frame.bottom, x, frame.bottom + 4, "axis"), _text(x, frame.bottom + 17, text, "middle")]
            free = x + half + 6
    middle = (frame.left + frame.right) / 2
    room = 2 * min(middle, frame.right - middle + 10)
    parts.append(_text(middle, frame.bottom + 36, _fitted(title, room), "middle", "name"))
    return parts


def _marker(k: int, x: float, y: float, title: str) -> str:
    """A point: each series has its own shape as well as its own colour."""
    r = 4.0
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"',
        f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 9h-10z"',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"',
        f'<path d="M{x:.1f} {y + 5:.1f}l5 -9h-10z"',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"',
        f'<rect x="{x - 2.5:.1f}" y="{y - 5:.1f}" width="5" height="10"',
    )
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'{shapes[k % _SHAPES]} class="s{k % _SHAPES} point">{inner}{_closing(k)}'


def _closing(k: int) -> str:
    return ("</circle>", "</rect>", "</path>", "</path>", "</path>", "</circle>", "</rect>")[k % _SHAPES]


def _legend(names: Sequence[str], width: float, bars: bool) -> tuple[list[str], float]:
    """A legend above the plot, wrapped to the width; its parts and its height."""
    if len(names) < 2:
        return [], 0.0
    parts, x, y = [], 0.0, 12.0
    for k, name in enumerate(names):
        wide = min(22 + _width(name) + 16, width)
        if x and x + wide > width:
            x, y = 0.0, y + 20
        if bars:
            parts.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="14" height="12" class="s{k % _SHAPES} bar"/>')
        else:
            parts += [_line(x, y - 4, x + 16, y - 4, f"s{k % _SHAPES} line"), _marker(k, x + 8, y - 4, "")]
        parts.append(_text(x + 22, y, _fitted(name, width - 24)))
        x += wide
    return parts, y + 12


def line_plot(plot: LinePlot, width: float, css: str = "") -> str:
    """One drawing of a LinePlot at that width in pixels."""
    ys = [y for s in plot.series for y in s.y] + [r.value for r in plot.references]
    narrow = width < 500
    xs = [x for s in plot.series for x in s.x]
    x_axis = Axis.over(*span(xs, plot.x_log), plot.x_log, 4 if narrow else 8, plot.x_format, whole=whole_numbers(xs))
    y_axis = Axis.over(*span(ys, plot.y_log, plot.y_from_zero), plot.y_log, 5, plot.y_format)
    parts, legend = _legend([s.name for s in plot.series], width, bars=False)
    gutter = max(_width(number(t, plot.y_format)) for t in y_axis.ticks)
    top = legend + 26
    frame = _Frame(gutter + 12, top, width - 14, top + (200 if narrow else 260))
    parts.append(_text(0, top - 10, _fitted(_with_unit(plot.y_title, plot.y_unit), width), "start", "name"))
    for tick in y_axis.ticks:
        y = frame.y(y_axis.place(tick))
        parts.append(_line(frame.left, y, frame.right, y, "grid"))
        parts.append(_text(frame.left - 8, y + 4, number(tick, plot.y_format), "end"))
    parts += _x_ticks(frame, x_axis, plot.x_format, _with_unit(plot.x_title, plot.x_unit), grid=False)
    parts.append(_line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))
    for reference in plot.references:
        y = frame.y(y_axis.place(reference.value))
        parts.append(_line(frame.left, y, frame.right, y, "reference"))
        parts.append(_text(frame.right, y - 5, _fitted(reference.label, frame.right - frame.left), "end", "mark"))
    for k, series in enumerate(plot.series):
        path, pen, points = [], "M", []
        for x, value in zip(series.x, series.y, strict=True):
            if value is None or not drawable(x, value) or (plot.y_log and value <= 0):
                pen = "M"
                continue
            px, py = frame.x(x_axis.place(x)), frame.y(y_axis.place(value))
            path.append(f"{pen}{px:.1f} {py:.1f}")
            pen = "L"
            says = f"{series.name}: {number(value, plot.y_format)} {plot.y_unit}".rstrip()
            points.append(_marker(k, px, py, f"{says} at {number(x, plot.x_format)} {plot.x_unit}".rstrip()))
        if path:
            parts.append(f'<path d="{"".join(path)}" class="s{k % _SHAPES} line"/>')
        if len(points) <= 80:
            parts += points
    return _svg(width, frame.bottom + 44, f"{plot.title}: {plot.y_title} against {plot.x_title}", parts, css)


def bar_plot(plot: BarPlot, width: float, css: str = "") -> str:
    """One drawing of a BarPlot at that width in pixels."""
    narrow = width < 500
    totals = [sum(finite([s.y[i] for s in plot.series])) for i in range(len(plot.categories))]
    drawn = totals if plot.stacked else [v for s in plot.series for v in finite(s.y)]
    low, high = span([*drawn, *(r.value for r in plot.references)], plot.log, zero=True)
    axis = Axis.over(low / 10 if plot.log else low, high, plot.log, 3 if narrow else 6, plot.format)
    labels = [shorten(visible(name), 14 if narrow else 34) for name in plot.categories]
    parts, legend = _legend([s.name for s in plot.series], width, bars=True)
    left = max(map(_width, labels), default=0.0) + 10
    value_room = max((_width(number(v, plot.format)) for v in drawn), default=0.0) + 8
    thick = 18.0 if plot.stacked or len(plot.series) == 1 else 12.0
    each = (thick if plot.stacked else thick * len(plot.series)) + 12
    top = legend + (22 if plot.references else 6)
    frame = _Frame(left, top, width - value_room, top + each * max(len(labels), 1))
    parts += _x_ticks(frame, axis, plot.format, _with_unit(plot.value_title, plot.unit), grid=True)
    parts.append(_line(frame.left, frame.top, frame.left, frame.bottom, "axis"))
    zero = axis.low if plot.log else 0.0
    for i, label in enumerate(labels):
        y = frame.top + i * each + 6
        name = f"<title>{escape(plot.categories[i])}</title>"
        parts.append(_text(frame.left - 8, y + (each - 12) / 2 + 4, label, "end").replace("</text>", name + "</text>"))
        start = zero
        for k, series in enumerate(plot.series):
            value = series.y[i]
            if value is None or not drawable(value):
                continue
            begin, end = (start, start + value) if plot.stacked else (zero, value)
            x0, x1 = sorted(frame.x(axis.share(v) or 0.0) for v in (begin, end))
            title = f"{plot.categories[i]}, {series.name}: {number(value, plot.format)} {plot.unit}".strip()
            parts.append(
                f'<rect x="{x0:.1f}" y="{y:.1f}" width="{max(x1 - x0, 0.5):.1f}" height="{thick:g}" '
                f'class="s{k % _SHAPES} bar"><title>{escape(title)}</title></rect>'
            )
            if plot.stacked:
                start = end
            else:
                parts.append(_text(x1 + 5, y + thick / 2 + 4, number(value, plot.format), "start", "value"))
                y += thick
        if plot.stacked:
            parts.append(
                _text(
                    frame.x(axis.place(start)) + 5, y + thick / 2 + 4, number(totals[i], plot.format), "start", "value"
                )
            )
    for reference in plot.references:
        x = frame.x(axis.place(reference.value))
        parts.append(_line(x, frame.top, x, frame.bottom, "reference"))
        says = _fitted(f"{reference.label}: {number(reference.value, plot.format)}", width)
        half = _width(says) / 2
        parts.append(_text(min(max(x, half), width - half), frame.top - 6, says, "middle", "mark"))
    return _svg(width, frame.bottom + 44, f"{plot.title}: {plot.value_title}", parts, css)


def heat_map(plot: HeatMap, width: float, css: str = "", hide_first: bool = False) -> str:
    """One drawing of a HeatMap, as wide as its cells need and at least `width`-fitting where they allow."""
    first = 1 if hide_first else 0
    columns = [visible(c) for c in plot.columns[first:]]
    values = [list(row)[first:] for row in plot.values]
    log = plot.scale == "log"
    low, high = span([v for row in values for v in row], log)
    low, high = plot.low if plot.low is not None else low, plot.high if plot.high is not None else high
    axis = Axis(low, high, log, ())
    rows = [shorten(visible(r), 18) for r in plot.rows]
    heads = [shorten(c, 14) for c in columns]
    left = max(map(_width, rows), default=0.0) + 8
    cell = min(max((width - left - 10) / max(len(columns), 1), 16.0), 44.0)
    tall = min(max(cell, 16.0), 26.0)
    top = max(map(_width, heads), default=0.0) * 0.71 + 52
    frame = _Frame(left, top, left + cell * len(columns), top + tall * len(rows))
    room = max(map(_width, heads), default=0.0) * 0.71
    whole = max(frame.right + room, 260) + 6
    parts = [_text(0, 12, _fitted(f"→ {plot.column_title}", whole), "start", "name")]
    parts.append(_text(0, 29, _fitted(f"↓ {plot.row_title}", whole), "start", "name"))
    parts += [_text(frame.left + (j + 0.5) * cell, top - 6, head, "start", "", -45) for j, head in enumerate(heads)]
    for i, (row, name) in enumerate(zip(values, rows, strict=True)):
        y = frame.top + i * tall
        parts.append(_text(frame.left - 6, y + tall / 2 + 4, name, "end"))
        for j, value in enumerate(row):
            if value is None or not drawable(value):
                continue
            fraction = min(max(axis.place(value), 0.0), 1.0)
            title = f"{plot.rows[i]} → {plot.columns[j + first]}: {number(value, plot.format)}"
            parts.append(
                f'<rect x="{frame.left + j * cell:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" height="{tall - 1:.1f}" '
                f'fill="{value_colour(fraction)}"><title>{escape(title)}</title></rect>'
            )
    return _svg(whole, frame.bottom + 62, plot.title, parts + _scale(plot, frame, axis), css)


def _scale(plot: HeatMap, frame: _Frame, axis: Axis) -> list[str]:
    """The colour bar under a heat map."""
    y, wide = frame.bottom + 14, 200.0
    parts = [
        f'<rect x="{4 + i * wide / 40:.1f}" y="{y:.1f}" width="{wide / 40 + 0.5:.1f}" height="10" '
        f'fill="{value_colour((i + 0.5) / 40)}"/>'
        for i in range(40)
    ]
    parts.append(_text(4, y + 24, number(axis.low, plot.format)))
    parts.append(_text(4 + wide, y + 24, number(axis.high, plot.format), "end"))
    title = plot.value_title + (", log" if axis.log else "")
    return [*parts, _text(4, y + 40, _fitted(title, max(frame.right, 260)), "start", "name")]
