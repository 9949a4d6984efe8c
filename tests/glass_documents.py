"""Documents for the tests of the backends: every kind of block, and text that would break a careless one."""

from __future__ import annotations

import math

from cutaway.render.document import (
    BarPlot,
    Code,
    Column,
    Document,
    Heading,
    HeatMap,
    LinePlot,
    Reference,
    Series,
    Table,
    Text,
    Token,
    Tokens,
)

HOSTILE = """a<b & "c" </script><script>x()</script> "><img src=q onerror=x()> <s> &amp; \u2028"""
TOKENS = ["<s>", " the", "\n", "\n\n", "  ", "\t", "\r\n", "中文", "\u202eabc", "\0\x1b[31m", "&amp;", HOSTILE, "'", ""]


def everything(text: str = HOSTILE) -> Document:
    """A document with every kind of block; `text` stands in every place that shows text."""
    words = ["one", text, " two\n", "<s>"]
    square = [[(i + 1) / (j + 1) if j <= i else None for j in range(4)] for i in range(4)]
    return Document(
        text,
        [
            Heading(text),
            Heading(text, 3),
            Text(text),
            Text(text, "note"),
            Text(text, "warning"),
            Code(text, "sh", text),
            Table(
                [Column(text, wrap=True), Column("bytes", format="bytes"), Column("value", text, ".3f"), "plain"],
                [[text, 12288, 0.5, None], ["two", 1, math.nan, True]],
                caption=text,
                note=text,
                strong=frozenset({1}),
            ),
            LinePlot(
                text,
                "tokens",
                text,
                [
                    Series(text, [1.0, None, 3.0, math.nan], [1, 2, 4, 8]),
                    Series("flat", [2.0, 2.0], [1, 8]),
                ],
                y_unit="ms",
                references=[Reference(text, 2.5)],
                note=text,
            ),
            LinePlot("log", "x", "y", [Series("a", [1e-6, 1.0, 1e6], [1, 10, 100])], x_log=True, y_log=True),
            LinePlot("nothing", "x", "y", []),
            BarPlot(text, text, words, [Series(text, [1.0, 2.0, None, 0.0]), Series("b", [4.0, 3.0, 2.0, 1.0])]),
            BarPlot(
                "stacked",
                "size",
                words,
                [Series("a", [1e6] * 4), Series("b", [2e6] * 4)],
                format="bytes",
                stacked=True,
                references=[Reference(text, 2e6)],
            ),
            BarPlot("below zero", "change", ["a", "b"], [Series("s", [-1.0, 2.0])]),
            HeatMap(text, text, text, text, words, words, square, can_hide_first=True, scale="log", note=text),
            HeatMap("wide", "layer", "token", "norm", ["0"], [str(i) for i in range(90)], [list(range(90))]),
            Tokens(
                [Token(token, i / len(TOKENS), f"tip {token}") for i, token in enumerate(TOKENS)],
                value_title=text,
                caption=text,
                note=text,
            ),
            Tokens([Token(token) for token in TOKENS]),
            Tokens([Token("a", math.inf), Token("b", math.nan), Token("c", -math.inf), Token("d", 1.0)]),
            HeatMap("none", "r", "c", "v", [], [], []),
            HeatMap("nothing", "r", "c", "v", ["a"], ["b"], [[math.nan]], scale="log"),
            BarPlot("none", "v", [], []),
            BarPlot("logarithmic", "v", ["a", "b"], [Series("s", [0.0, 5.0])], log=True),
            LinePlot("zeros", "x", "y", [Series("s", [0.0, 0.0], [1, 2])], y_log=True),
            Table(["none"], []),
        ],
        subtitle=text,
    )
