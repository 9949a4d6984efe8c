"""The document model: what a result looks like before anyone decides where it is shown.

A view (`render/views/`) turns a typed result into a `Document`; a backend (`terminal.py`, `markdown.py`, `html.py`,
`png.py`) turns a `Document` into output. Everything here is plain data: strings, numbers, lists. Text is plain text
and is never read as markup by any backend. Read next: `html.py`, the backend that shows everything.

Number formats (`Column.format`, `unit` of plots):
  ""        as it is: integers with thousands separators, floats with four significant digits
  "bytes"   KiB, MiB, GiB, written with the number
  "seconds" ns, us, ms, s, written with the number
  "percent" a fraction shown as a percentage
  "id"      an integer without separators
  other     a Python format specification, such as ".3f"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "BarPlot",
    "Block",
    "Cell",
    "Code",
    "Column",
    "Document",
    "Heading",
    "HeatMap",
    "Language",
    "LinePlot",
    "Reference",
    "Series",
    "Table",
    "Text",
    "Token",
    "Tokens",
]

Cell = str | int | float | bool | None
Language = Literal["en", "zh"]


@dataclass(frozen=True)
class Heading:
    """A heading; level 2 is a section of the document, 3 a part of it."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """One paragraph. `tone` "note" is an aside, "warning" something the reader must not miss."""

    text: str
    tone: Literal["body", "note", "warning"] = "body"


@dataclass(frozen=True)
class Code:
    """Text shown as it is, in a fixed-width face: a command, a prompt, generated text."""

    text: str
    language: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table: `name (unit)` is its heading, `format` says how its numbers are written.

    `wrap` marks the column that may be broken over lines where space is short (names, text).
    """

    name: str
    unit: str = ""
    format: str = ""
    wrap: bool = False

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns. A `None` cell is shown as an en dash. `strong` are indices of emphasised rows."""

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    note: str = ""
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Series:
    """A named row of numbers: `y` against `x` in a LinePlot, one `y` a category in a BarPlot (`x` unused).

    NaN or None is a gap.
    """

    name: str
    y: Sequence[float | None]
    x: Sequence[float] = ()


@dataclass(frozen=True)
class Reference:
    """A straight line with a label at one value of the y axis (LinePlot) or of the value axis (BarPlot)."""

    label: str
    value: float


@dataclass(frozen=True)
class LinePlot:
    """Lines with points. Titles name the quantity; units stand apart and are shown with them."""

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    x_unit: str = ""
    y_unit: str = ""
    x_format: str = ""
    y_format: str = ""
    x_log: bool = False
    y_log: bool = False
    y_from_zero: bool = True
    references: Sequence[Reference] = ()
    note: str = ""


@dataclass(frozen=True)
class BarPlot:
    """Horizontal bars, one group a category; `stacked` puts the series of a category end to end."""

    title: str
    value_title: str
    categories: Sequence[str]
    series: Sequence[Series]
    unit: str = ""
    format: str = ""
    log: bool = False
    stacked: bool = False
    references: Sequence[Reference] = ()
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A grid of values [rows, columns] in colours. NaN or None is an empty cell.

    `can_hide_first` offers the same map without its first column, on a scale of its own: an attention map whose
    first token takes nearly everything says nothing before that column is gone.
    """

    title: str
    row_title: str
    column_title: str
    value_title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    scale: Literal["linear", "log"] = "linear"
    low: float | None = None
    high: float | None = None
    format: str = ""
    can_hide_first: bool = False
    note: str = ""


@dataclass(frozen=True)
class Token:
    """A piece of text exactly as the tokenizer made it, a value for its colour, and what a pointer over it says."""

    text: str
    value: float | None = None
    tooltip: str = ""


@dataclass(frozen=True)
class Tokens:
    """Text shown token by token, each coloured by its value between `low` and `high` (default: their extremes)."""

    tokens: Sequence[Token]
    value_title: str = ""
    low: float | None = None
    high: float | None = None
    format: str = ""
    caption: str = ""
    note: str = ""


Block = Heading | Text | Code | Table | LinePlot | BarPlot | HeatMap | Tokens


@dataclass(frozen=True)
class Document:
    """A title and blocks in reading order. `subtitle` says of what model and machine it speaks."""

    title: str
    blocks: Sequence[Block] = field(default_factory=list)
    subtitle: str = ""
    language: Language = "en"
