"""A document as GitHub-flavoured Markdown: text is escaped, plots become tables of their numbers.

Read next: `terminal.py`, which draws with characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cutaway.render.document import (
    BarPlot,
    Block,
    Cell,
    Code,
    Column,
    Document,
    Heading,
    HeatMap,
    LinePlot,
    Table,
    Text,
    Tokens,
)
from cutaway.render.numbers import column_of, is_number, number
from cutaway.render.plain import visible

__all__ = ["markdown"]

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~$])")


def _escape(text: str) -> str:
    """Plain text that Markdown shows as it is, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;")
    text = _SPECIAL.sub(r"\\\1", text)
    return re.sub(r"^(\d+)([.)])(?=\s|$)|^([-+=])", lambda m: f"{m[1]}\\{m[2]}" if m[1] else f"\\{m[3]}", text)


def _fence(text: str, language: str = "") -> str:
    """A fenced block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip(chr(10))}\n{fence}"


def _table(
    columns: Sequence[Column | str], rows: Sequence[Sequence[Cell]], strong: frozenset[int] = frozenset()
) -> str:
    heads = [column_of(c) for c in columns]
    right = [any(is_number(row[i]) for row in rows) for i in range(len(heads))]
    lines = [
        "| " + " | ".join(_escape(c.heading) for c in heads) + " |",
        "|" + "|".join(" ---: " if r else " --- " for r in right) + "|",
    ]
    for index, row in enumerate(rows):
        cells = [_escape(visible(number(value, c.format))) for value, c in zip(row, heads, strict=True)]
        if index in strong:
            cells = [f"**{cell}**" if cell else cell for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _titled(title: str, body: str, note: str) -> str:
    parts = [f"**{_escape(title)}**" if title else "", body, f"_{_escape(note)}_" if note else ""]
    return "\n\n".join(part for part in parts if part)


def _unit(title: str, unit: str) -> str:
    return f"{title} ({unit})" if unit else title


def _line_plot(plot: LinePlot) -> str:
    xs = sorted({x for series in plot.series for x in series.x})
    found = [dict(zip(series.x, series.y, strict=True)) for series in plot.series]
    columns = [Column(_unit(plot.x_title, plot.x_unit), format=plot.x_format)]
    columns += [Column(_unit(series.name, plot.y_unit), format=plot.y_format) for series in plot.series]
    rows: list[list[Cell]] = [[x, *(values.get(x) for values in found)] for x in xs]
    body = _table(columns, rows)
    notes = [f"{r.label}: {number(r.value, plot.y_format)}" for r in plot.references]
    return _titled(f"{plot.title}: {plot.y_title}", body, "; ".join([*notes, plot.note] if plot.note else notes))


def _bar_plot(plot: BarPlot) -> str:
    columns = [Column("")] + [
        Column(_unit(s.name or plot.value_title, plot.unit), format=plot.format) for s in plot.series
    ]
    rows: list[list[Cell]] = [[name, *(s.y[i] for s in plot.series)] for i, name in enumerate(plot.categories)]
    notes = [f"{r.label}: {number(r.value, plot.format)}" for r in plot.references]
    body = _table(columns, rows)
    return _titled(f"{plot.title}: {plot.value_title}", body, "; ".join([*notes, plot.note] if plot.note else notes))


def _heat_map(plot: HeatMap) -> str:
    columns = [Column(f"{plot.row_title} \\ {plot.column_title}")]
    columns += [Column(visible(name), format=plot.format or ".3g") for name in plot.columns]
    rows: list[list[Cell]] = [[visible(name), *values] for name, values in zip(plot.rows, plot.values, strict=True)]
    return _titled(f"{plot.title}: {plot.value_title}", _table(columns, rows), plot.note)


def _tokens(block: Tokens) -> str:
    rows: list[list[Cell]] = [[i, visible(t.text), t.value] for i, t in enumerate(block.tokens)]
    columns = [Column("#", format="id"), Column("token"), Column(block.value_title or "value", format=block.format)]
    if all(t.value is None for t in block.tokens):
        columns, rows = columns[:2], [row[:2] for row in rows]
    return _titled(block.caption, _table(columns, rows), block.note)


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return "#" * min(block.level, 6) + " " + _escape(block.text)
    if isinstance(block, Text):
        text = _escape(block.text)
        return {"body": text, "note": f"> {text}", "warning": f"> **⚠ {text}**"}[block.tone]
    if isinstance(block, Code):
        return _titled(block.caption, _fence(block.text, block.language), "")
    if isinstance(block, Table):
        return _titled(block.caption, _table(block.columns, block.rows, block.strong), block.note)
    if isinstance(block, LinePlot):
        return _line_plot(block)
    if isinstance(block, BarPlot):
        return _bar_plot(block)
    if isinstance(block, HeatMap):
        return _heat_map(block)
    return _tokens(block)


def markdown(document: Document) -> str:
    """The document as Markdown text."""
    parts = [f"# {_escape(document.title)}"]
    if document.subtitle:
        parts.append(_escape(document.subtitle))
    parts += [_block(block) for block in document.blocks]
    return "\n\n".join(parts) + "\n"
