"""Terminal, Markdown, JSON and PNG."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from glass_documents import HOSTILE, everything
from rich.cells import cell_len

from cutaway.errors import RequestError
from cutaway.render import format_of, render, save
from cutaway.render.document import BarPlot, Code, Column, Document, HeatMap, LinePlot, Series, Table, Text
from cutaway.render.json import script_json, to_json
from cutaway.render.png import png

# -- terminal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_terminal_never_goes_past_its_width(width: int) -> None:
    text = render(everything(), "terminal", width=width)
    assert max(cell_len(line) for line in text.split("\n")) <= width


def test_without_colour_there_is_no_escape_code_and_no_control_character() -> None:
    text = render(everything("\x1b[31mred\x1b[0m \u202eabc\x07"), "terminal")
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text) == []
    assert "␛[31mred" in text


def test_with_colour_there_are_codes_and_the_same_text() -> None:
    plain, coloured = (render(everything(), "terminal", colour=c) for c in (False, True))
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.split("\n")] == plain.split("\n")


def test_text_is_never_read_as_markup() -> None:
    assert "[bold]x[/bold] [link=a]b[/link] :smile:" in render(
        Document("t", [Text("[bold]x[/bold] [link=a]b[/link] :smile:")]), "terminal"
    )


def test_a_line_plot_shows_where_its_points_lie() -> None:
    plot = LinePlot("t", "x", "y", [Series("up", [0.0, 10.0], [0, 10]), Series("down", [10.0, 0.0], [0, 10])])
    lines = render(Document("d", [plot]), "terminal").split("\n")
    top, bottom = (
        next(i for i, line in enumerate(lines) if "10 │" in line),
        next(i for i, line in enumerate(lines) if " 0 │" in line),
    )
    assert lines[top].index("○") < 10 < lines[top].index("●")
    assert lines[bottom].index("●") < 10 < lines[bottom].index("○")


# -- Markdown ---------------------------------------------------------------------------------------------------------


def test_markdown_is_escaped_and_its_tables_are_whole() -> None:
    document = Document("t", [Table([Column("a|b"), "n"], [["x|y\n*z* <b> `c`", 1], ["u", 2]], caption="_cap_")])
    text = render(document, "md")
    rows = [line for line in text.split("\n") if line.startswith("|")]
    assert len(rows) == 4
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert rows[2] == r"| x\|y⏎\*z\* \<b\> \`c\` | 1 |"
    assert r"**\_cap\_**" in text


def test_code_keeps_its_fence_whatever_it_holds() -> None:
    text = render(Document("t", [Code("```\nx\n````", "sh")]), "md")
    assert "`````sh\n```\nx\n````\n`````" in text


def test_every_plot_becomes_its_numbers() -> None:
    plot = LinePlot("t", "n", "time", [Series("on", [1.5, None], [1, 2]), Series("off", [3.0], [2])], y_unit="ms")
    text = render(Document("t", [plot]), "md")
    assert "| n | on (ms) | off (ms) |" in text
    assert "| 1 | 1.5 | – |" in text
    assert "| 2 | – | 3 |" in text
    assert render(everything(), "md")


# -- JSON -------------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    A = "a"


@dataclass(frozen=True)
class Result:
    array: np.ndarray
    scalar: np.float32
    path: Path
    kind: Kind
    ids: frozenset[int]
    table: dict[int, tuple[float, ...]]
    text: str
    hidden: int = field(default=1, repr=False)


def test_json_holds_every_number_of_a_result() -> None:
    result = Result(
        np.array([[1.5, np.nan], [np.inf, -2]], np.float32),
        np.float32(0.25),
        Path("/a/b"),
        Kind.A,
        frozenset({2, 1}),
        {7: (1.0,)},
        HOSTILE,
    )
    assert json.loads(to_json(result)) == {
        "array": [[1.5, None], [None, -2.0]],
        "scalar": 0.25,
        "path": "/a/b",
        "kind": "a",
        "ids": [1, 2],
        "table": {"7": [1.0]},
        "text": HOSTILE,
    }


def test_json_in_a_page_cannot_end_its_element() -> None:
    text = script_json({"t": HOSTILE + "<!--"})
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert json.loads(text) == {"t": HOSTILE + "<!--"}


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        to_json(object())


# -- PNG and files ----------------------------------------------------------------------------------------------------


def test_png_holds_all_plots_and_no_text_is_read_as_mathematics(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.png"
    save(everything("$x^2$ \\frac $"), path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 1200
    assert height > 4000


def test_a_png_s_ticks_are_round_and_read_as_the_page_s(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures = []
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda canvas, out: figures.append(canvas.figure))
    mib = 2.0**20
    plots = [
        BarPlot("m", "memory", ["a", "b"], [Series("s", [100 * mib, 1300 * mib])], format="bytes"),
        HeatMap("h", "r", "c", "v", ["a"], ["b", "c"], [[1e-4, 1.0]], scale="log", low=1e-4, high=1.0),
    ]
    png(Document("t", plots))
    figures[0].canvas.draw()
    bars, _, scale = figures[0].axes
    assert [t.get_text() for t in bars.get_xticklabels()] == [
        "0 B",
        "256 MiB",
        "512 MiB",
        "768 MiB",
        "1 GiB",
        "1.25 GiB",
        "1.5 GiB",
    ]
    assert [t.get_text() for t in scale.get_yticklabels() if t.get_text()] == ["0.0001", "0.001", "0.01", "0.1", "1"]


def test_a_result_without_plots_has_no_png(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no plot"):
        save(Document("t", [Text("x")]), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


NAMES = {"html": "a.html", "md": "a.md", "json": "a.json", "png": "a.png", "terminal": "a.txt"}


@pytest.mark.parametrize(("form", "name"), [*NAMES.items(), ("html", "a.HTM")])
def test_a_file_name_chooses_the_form(form: str, name: str) -> None:
    assert format_of(name) == form


def test_a_name_that_means_no_form_is_refused() -> None:
    with pytest.raises(RequestError, match=r"report\.pdf"):
        format_of("/a/report.pdf")
    with pytest.raises(RequestError, match="'pdf'"):
        render(Document("t"), "pdf")
