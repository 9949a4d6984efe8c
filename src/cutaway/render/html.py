"""A document as one self-contained HTML page: inline style, inline SVG, no script, no network; it works when mailed.

Every string is escaped on its way in, a token's text content is exactly the token (whitespace is made visible by the
style sheet, not by changing it), and the numbers behind the page travel inside it as JSON. Read next: `style.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutaway.render.document import (
    BarPlot,
    Block,
    Code,
    Document,
    Heading,
    HeatMap,
    LinePlot,
    Table,
    Text,
    Tokens,
)
from cutaway.render.json import script_json
from cutaway.render.numbers import Axis, column_of, is_number, number, span
from cutaway.render.palette import ink_on, value_colour
from cutaway.render.plain import signs
from cutaway.render.style import STYLE
from cutaway.render.svg import bar_plot, escape, heat_map, line_plot

__all__ = ["page"]

_WIDE, _NARROW = 800.0, 330.0
_WORDS = {
    "en": {"hide": "hide the first column", "contents": "Contents", "low": "from", "high": "to"},
    "zh": {"hide": "隐藏第一列", "contents": "目录", "low": "从", "high": "到"},
}


def _figure(title: str, body: str, note: str, css: str) -> str:
    head = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    foot = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure class="{css}">{head}{body}{foot}</figure>'


def _scroll(body: str, label: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'


def _seen(text: str, every_space: bool = False) -> str:
    """A text's own characters, those that cannot be seen wrapped so that the style sheet draws a sign for them."""
    return "".join(
        escape(c) if sign is None else f'<i data-sign="{escape(sign)}">{escape(c)}</i>'
        for c, sign in signs(text, every_space)
    )


def _table(table: Table) -> str:
    columns = [column_of(c) for c in table.columns]
    css = []
    for i, column in enumerate(columns):
        names = (["n"] if any(is_number(row[i]) for row in table.rows) else []) + (["w"] if column.wrap else [])
        css.append(f' class="{" ".join(names)}"' if names else "")
    head = "".join(f'<th scope="col"{c}>{escape(col.heading)}</th>' for c, col in zip(css, columns, strict=True))
    rows = []
    for index, row in enumerate(table.rows):
        cells = "".join(
            f"<td{c}>{_seen(number(value, col.format))}</td>" for value, c, col in zip(row, css, columns, strict=True)
        )
        rows.append(f'<tr class="strong">{cells}</tr>' if index in table.strong else f"<tr>{cells}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _figure(table.caption, _scroll(body, table.caption or "table"), table.note, "table")


def _both(draw: Callable[[float, str], str]) -> str:
    """The same plot for a wide column and for a phone; the style sheet shows one of them."""
    return draw(_WIDE, "wide") + draw(_NARROW, "narrow")


def _heat_map(plot: HeatMap, index: int, words: dict[str, str]) -> str:
    def scrolled(hide: bool) -> str:
        return _scroll(_both(lambda width, css: heat_map(plot, width, css, hide)), plot.title)

    if not plot.can_hide_first or len(plot.columns) < 2:
        return _figure(plot.title, scrolled(False), plot.note, "plot heat")
    toggle = (
        f'<input type="checkbox" class="toggle" id="hide{index}">'
        f'<label for="hide{index}">{words["hide"]}</label>'
        f'<div class="with">{scrolled(False)}</div><div class="without">{scrolled(True)}</div>'
    )
    return _figure(plot.title, toggle, plot.note, "plot heat")


def _tokens(block: Tokens, words: dict[str, str]) -> str:
    valued = [t.value for t in block.tokens if t.value is not None]
    low, high = span(valued)
    low, high = block.low if block.low is not None else low, block.high if block.high is not None else high
    axis = Axis(low, high, False, ())
    spans = []
    for token in block.tokens:
        style = ""
        fraction = axis.share(token.value)
        if fraction is not None:
            style = f' style="background:{value_colour(fraction)};color:{ink_on(fraction)}"'
        tip = token.tooltip or (number(token.value, block.format) if token.value is not None else "")
        title = f' title="{escape(tip)}"' if tip else ""
        spans.append(
            f'<span class="token" data-token="{escape(token.text)}"{title}{style}>{_seen(token.text, True)}</span>'
        )
    scale = ""
    if valued:
        steps = ",".join(value_colour(i / 9) for i in range(10))
        scale = (
            f'<p class="scale">{escape(block.value_title)}: {escape(number(low, block.format))} '
            f'<span class="ramp" style="background:linear-gradient(90deg,{steps})"></span> '
            f"{escape(number(high, block.format))}</p>"
        )
    return _figure(block.caption, f'<div class="tokens">{"".join(spans)}</div>{scale}', block.note, "tokenbox")


def _block(block: Block, index: int, words: dict[str, str]) -> str:
    if isinstance(block, Heading):
        level = min(max(block.level, 2), 6)
        return f'<h{level} id="s{index}">{escape(block.text)}</h{level}>'
    if isinstance(block, Text):
        css = "" if block.tone == "body" else f' class="{block.tone}"'
        return f"<p{css}>{escape(block.text)}</p>"
    if isinstance(block, Code):
        return _figure(block.caption, f"<pre><code>{escape(block.text)}</code></pre>", "", "code")
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, LinePlot):
        return _figure(block.title, _both(lambda width, css: line_plot(block, width, css)), block.note, "plot")
    if isinstance(block, BarPlot):
        return _figure(block.title, _both(lambda width, css: bar_plot(block, width, css)), block.note, "plot")
    if isinstance(block, HeatMap):
        return _heat_map(block, index, words)
    return _tokens(block, words)


def _contents(blocks: Sequence[Block], words: dict[str, str]) -> str:
    heads = [(i, b.text) for i, b in enumerate(blocks) if isinstance(b, Heading) and b.level <= 2]
    if len(heads) < 4:
        return ""
    items = "".join(f'<li><a href="#s{i}">{escape(text)}</a></li>' for i, text in heads)
    return f'<nav aria-label="{words["contents"]}"><ol>{items}</ol></nav>'


def page(document: Document, data: Any = None) -> str:
    """The document as one HTML page. `data`, a typed result, is embedded as JSON under the id `data`."""
    words = _WORDS[document.language]
    body = "\n".join(_block(block, i, words) for i, block in enumerate(document.blocks))
    subtitle = f'<p class="subtitle">{escape(document.subtitle)}</p>' if document.subtitle else ""
    carried = "" if data is None else f'<script type="application/json" id="data">{script_json(data)}</script>\n'
    language = "zh-CN" if document.language == "zh" else "en"
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(document.title)}</h1>{subtitle}</header>\n{_contents(document.blocks, words)}\n"
        f"{body}\n</main>\n{carried}</body>\n</html>\n"
    )
