"""A document for the terminal: rich tables, and plots drawn with characters. Legible without colour.

Everything fits the width asked for (80 by default); text from models is never read as rich markup. Read next:
`html.py`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from cutaway.render.document import (
    BarPlot,
    Block,
    Code,
    Document,
    Heading,
    HeatMap,
    LinePlot,
    Series,
    Table,
    Text,
    Tokens,
)
from cutaway.render.numbers import Axis, column_of, drawable, finite, is_number, number, span, whole_numbers
from cutaway.render.palette import ink_on, value_colour
from cutaway.render.plain import harmless, visible

__all__ = ["show", "terminal"]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_FILLS = "█▒░▓▚▞▪"  # a series is told by its pattern, so that colour is not needed
_MARKS = "●○◆◇■□▲"
_SHADES = " ·░▒▓█"
_COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan", "white")


def _note(text: str) -> RenderableType:
    return RichText(text, style="dim italic")


def _titled(title: str, body: list[RenderableType], note: str) -> RenderableType:
    head: list[RenderableType] = [RichText(title, style="bold")] if title else []
    return Group(*head, *body, *([_note(note)] if note else []))


def _table(table: Table, width: int) -> RenderableType:
    columns = [column_of(c) for c in table.columns]
    numeric = [any(is_number(row[i]) for row in table.rows) for i in range(len(columns))]
    made = RichTable(show_edge=False, pad_edge=False, box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    wraps = any(c.wrap for c in columns)
    for i, column in enumerate(columns):
        made.add_column(
            RichText(column.heading),
            justify="right" if numeric[i] else "left",
            overflow="fold",
            no_wrap=wraps and not column.wrap and numeric[i],
        )
    for index, row in enumerate(table.rows):
        cells = [RichText(visible(number(value, c.format))) for value, c in zip(row, columns, strict=True)]
        made.add_row(*cells, style="bold" if index in table.strong else None)
    return _titled(table.caption, [made], table.note)


def _bar(start: float, end: float, columns: int, fill: str) -> str:
    """Characters of one bar segment between two fractions of `columns`."""
    first, last = round(start * columns), round(end * columns)
    if fill != "█" or start > 0:
        return fill * max(last - first, 0)
    eighths = round(end * columns * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _bar_plot(plot: BarPlot, width: int) -> RenderableType:
    totals = (
        [sum(finite([s.y[i] for s in plot.series])) for i in range(len(plot.categories))]
        if plot.stacked
        else [v for s in plot.series for v in finite(s.y)]
    )
    low, high = span([*totals, *(r.value for r in plot.references)], plot.log, zero=True)
    axis = Axis.over(low / 10 if plot.log else low, high, plot.log, format=plot.format)
    labels = [visible(name) for name in plot.categories]
    label_width = min(max(map(cell_len, labels), default=0), width // 3)
    bar_width = max(width - label_width - 16, 10)
    lines: list[RenderableType] = []
    for i, label in enumerate(labels):
        shown = [(k, s.y[i]) for k, s in enumerate(plot.series)]
        if plot.stacked:
            line, start = RichText(set_cell_size(label, label_width) + " "), 0.0
            for k, value in shown:
                end = start + (value or 0.0)
                line.append(_bar(axis.place(start), axis.place(end), bar_width, _FILLS[k % 7]), _COLOURS[k % 7])
                start = end
            line.append(f" {number(start, plot.format)}")
            lines.append(line)
            continue
        for k, value in shown:
            name = label if k == 0 else ""
            line = RichText(set_cell_size(name, label_width) + " ")
            if value is not None:
                start = 0.0 if plot.log or low >= 0 else axis.place(0.0)
                line.append(_bar(start, axis.place(value), bar_width, _FILLS[k % 7]), _COLOURS[k % 7])
            line.append(f" {number(value, plot.format)}")
            lines.append(line)
    if len(plot.series) > 1:
        legend = RichText("")
        for k, series in enumerate(plot.series):
            legend.append(f"{_FILLS[k % 7] * 2} ", _COLOURS[k % 7]).append(f"{series.name}   ")
        lines.append(legend)
    for reference in plot.references:
        lines.append(RichText(f"{reference.label}: {number(reference.value, plot.format)}"))
    title = f"{plot.title}: {plot.value_title}" + (f" ({plot.unit})" if plot.unit else "")
    return _titled(title + (", log scale" if plot.log else ""), lines, plot.note)


def _interpolated(series: Series, axis: Axis, columns: int) -> Iterator[tuple[int, float]]:
    """(column, y) along the straight lines between the points of a series."""
    points = [(axis.place(x), y) for x, y in zip(series.x, series.y, strict=True) if y is not None and drawable(x, y)]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        first, last = round(x0 * (columns - 1)), round(x1 * (columns - 1))
        for column in range(first + 1, last):
            yield column, y0 + (y1 - y0) * (column - first) / (last - first)


def _line_plot(plot: LinePlot, width: int) -> RenderableType:
    ys = [y for s in plot.series for y in s.y] + [r.value for r in plot.references]
    xs = [x for s in plot.series for x in s.x]
    x_axis = Axis.over(*span(xs, plot.x_log), plot.x_log, 5, plot.x_format, whole=whole_numbers(xs))
    y_axis = Axis.over(*span(ys, plot.y_log, plot.y_from_zero), plot.y_log, 4, plot.y_format)
    ticks = {round(y_axis.place(t) * 11): number(t, plot.y_format) for t in y_axis.ticks}
    gutter = max(map(cell_len, ticks.values()), default=0)
    columns = width - gutter - 3
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(12)]

    def put(column: int, y: float, mark: str, style: str, over: bool) -> None:
        place = y_axis.place(y)
        if -0.01 <= place <= 1.01 and 0 <= column < columns:
            row = 11 - min(max(round(place * 11), 0), 11)
            if over or grid[row][column][0] == " ":
                grid[row][column] = (mark, style)

    for k, series in enumerate(plot.series):
        for column, y in _interpolated(series, x_axis, columns):
            put(column, y, "·", _COLOURS[k % 7], False)
        for x, value in zip(series.x, series.y, strict=True):
            if value is not None and drawable(value):
                put(round(x_axis.place(x) * (columns - 1)), value, _MARKS[k % 7], _COLOURS[k % 7], True)
    for reference in plot.references:
        for column in range(0, columns, 2):
            put(column, reference.value, "-", "dim", False)
    lines: list[RenderableType] = []
    for row in range(12):
        line = RichText(f"{ticks.get(11 - row, ''):>{gutter}} │")
        for mark, style in grid[row]:
            line.append(mark, style)
        lines.append(line)
    lines.append(RichText(" " * gutter + " └" + "─" * columns))
    below = [" "] * (columns + 1)
    for t in x_axis.ticks:
        text = number(t, plot.x_format)
        start = min(max(round(x_axis.place(t) * (columns - 1)) - len(text) // 2, 0), columns - len(text))
        if all(c == " " for c in below[max(start - 1, 0) : start + len(text) + 1]):
            below[start : start + len(text)] = text
    lines.append(RichText(" " * (gutter + 2) + "".join(below).rstrip()))
    x_title = f"{plot.x_title} ({plot.x_unit})" if plot.x_unit else plot.x_title
    lines.append(RichText(" " * (gutter + 2) + x_title))
    if len(plot.series) > 1 or plot.references:
        legend = RichText("")
        for k, series in enumerate(plot.series):
            legend.append(f"{_MARKS[k % 7]} ", _COLOURS[k % 7]).append(f"{series.name}   ")
        for reference in plot.references:
            legend.append(f"- - {reference.label}: {number(reference.value, plot.y_format)}   ")
        lines.append(legend)
    title = f"{plot.title}: {plot.y_title}" + (f" ({plot.y_unit})" if plot.y_unit else "")
    return _titled(title + (", log scale" if plot.y_log else ""), lines, plot.note)


def _heat_map(plot: HeatMap, width: int) -> RenderableType:
    first = 1 if plot.can_hide_first and len(plot.columns) > 1 else 0
    values = [list(row)[first:] for row in plot.values]
    flat = [v for row in values for v in row]
    low, high = span(flat, plot.scale == "log")
    low, high = plot.low if plot.low is not None else low, plot.high if plot.high is not None else high
    axis = Axis(low, high, plot.scale == "log", ())
    labels = [visible(name) for name in plot.rows]
    label_width = min(max(map(cell_len, labels), default=0), width // 3)
    each = 2 if 2 * len(plot.columns) + label_width + 1 <= width else 1
    fits = (width - label_width - 1) // each
    lines: list[RenderableType] = []
    for label, row in zip(labels, values, strict=True):
        line = RichText(set_cell_size(label, label_width) + " ")
        for value in row[:fits]:
            if value is None or not drawable(value):
                line.append(" " * each)
                continue
            fraction = min(max(axis.place(value), 0.0), 1.0)
            shade = _SHADES[min(int(fraction * len(_SHADES)), len(_SHADES) - 1)]
            line.append(shade * each, Style(color=value_colour(fraction)))
        lines.append(line)
    legend = f"{plot.value_title}: '{_SHADES[1]}' {number(low, plot.format)} to '█' {number(high, plot.format)}"
    lines.append(RichText(legend + (", log scale" if plot.scale == "log" else "")))
    lines.append(RichText(f"rows: {plot.row_title}; columns: {plot.column_title}, {first} to {len(plot.columns) - 1}"))
    if first:
        lines.append(RichText(f"the first column ({visible(plot.columns[0])}) is left out; the page shows it too"))
    if len(values and values[0]) > fits:
        lines.append(RichText(f"only the first {fits} columns fit this width"))
    return _titled(plot.title, lines, plot.note)


def _tokens(block: Tokens, width: int) -> RenderableType:
    valued = [t.value for t in block.tokens if t.value is not None]
    low, high = span(valued)
    low, high = block.low if block.low is not None else low, block.high if block.high is not None else high
    axis = Axis(low, high, False, ())
    above, below = RichText(""), RichText("")
    lines: list[RenderableType] = []

    def flush() -> None:
        nonlocal above, below
        if above.plain:
            lines.extend([above, below] if valued else [above])
        above, below = RichText(""), RichText("")

    for token in block.tokens:
        shown = visible(token.text) or "∅"
        while shown:
            piece = shown
            while cell_len(piece) > width - 2:
                piece = piece[:-1]
            shown = shown[len(piece) :]
            fraction = axis.share(token.value)
            digit = " " if fraction is None else str(min(int(fraction * 10), 9))
            if cell_len(above.plain) + cell_len(piece) + 1 > width:
                flush()
            style = Style()
            if fraction is not None:
                style = Style(color=ink_on(fraction), bgcolor=value_colour(fraction))
            above.append(piece, style).append(" ")
            below.append(digit + " " * cell_len(piece), "dim")
        if "\n" in token.text:
            flush()
    flush()
    if valued:
        scale = f"0 = {number(low, block.format)}, 9 = {number(high, block.format)}"
        lines.append(_note(f"{block.value_title}: {scale}"))
    return _titled(block.caption, lines, block.note)


def _block(block: Block, width: int) -> RenderableType:
    if isinstance(block, Heading):
        style = "bold underline" if block.level <= 2 else "bold"
        return RichText(block.text, style=style)
    if isinstance(block, Text):
        if block.tone == "warning":
            return RichText("! " + block.text, style="bold")
        return RichText(block.text, style="dim" if block.tone == "note" else "")
    if isinstance(block, Code):
        return _titled(block.caption, [Padding(RichText(block.text), (0, 0, 0, 4))], "")
    if isinstance(block, Table):
        return _table(block, width)
    if isinstance(block, LinePlot):
        return _line_plot(block, width)
    if isinstance(block, BarPlot):
        return _bar_plot(block, width)
    if isinstance(block, HeatMap):
        return _heat_map(block, width)
    return _tokens(block, width)


def _tame(value: Any) -> Any:
    """A document whose strings can do nothing to a terminal."""
    if isinstance(value, str):
        return harmless(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _tame(getattr(value, f.name)) for f in fields(value)})
    return [_tame(item) for item in value] if isinstance(value, (list, tuple)) else value


def show(document: Document, console: Console) -> None:
    """Print the document on a rich console (which decides about colour and honours NO_COLOR)."""
    width, document = min(console.width, 120), _tame(document)
    console.print(RichText(document.title, style="bold"), soft_wrap=False)
    if document.subtitle:
        console.print(RichText(document.subtitle, style="dim"))
    for block in document.blocks:
        console.print()
        console.print(_block(block, width), width=width)


def terminal(document: Document, width: int = 80, colour: bool = False) -> str:
    """The document as the text a terminal of that width shows; escape codes only with `colour`."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        no_color=not colour,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    show(document, console)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))
