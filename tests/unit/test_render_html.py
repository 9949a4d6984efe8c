"""The page, read by an HTML parser: nothing that a model or a file wrote becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from glass_documents import HOSTILE, TOKENS, everything

from cutaway.render import render
from cutaway.render.document import Document, HeatMap, LinePlot, Series, Table, Text, Token, Tokens

VOID = {"meta", "br", "input", "link", "img", "hr"}


class Page(HTMLParser):
    """Elements with their attributes and text; says so when tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict] = []
        self.open: list[dict] = []
        self.feed(text)
        self.close()
        assert self.open == [], [element["tag"] for element in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {"tag": tag, "text": "", **{key: value or "" for key, value in attrs}}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append({"tag": tag, "text": "", **{key: value or "" for key, value in attrs}})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, css: str | None = None) -> list[dict]:
        return [e for e in self.elements if e["tag"] == tag and (css is None or css in e.get("class", "").split())]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render(everything(), "html", data={"prompt": HOSTILE, "tokens": TOKENS}))


def test_hostile_text_adds_no_element(page: Page) -> None:
    tame = Page(render(everything("tame"), "html", data={"prompt": "tame"}))
    kinds = {element["tag"] for element in page.elements}
    assert kinds == {element["tag"] for element in tame.elements}
    assert not kinds & {"img", "iframe", "object", "embed", "base", "form", "s", "b"}
    assert len(page.all("script")) == 1
    assert page.all("script")[0]["type"] == "application/json"
    handlers = [key for element in page.elements for key in element if key.startswith("on")]
    assert handlers == []


def test_every_token_is_itself_in_text_attribute_and_tooltip(page: Page) -> None:
    shown = page.all("span", "token")
    expected = [token.replace("\0", "\ufffd") for token in TOKENS]  # HTML cannot hold the null character
    assert [element["text"] for element in shown] == [*expected * 2, *"abcd"]
    assert [element["data-token"] for element in shown] == [*expected * 2, *"abcd"]
    assert [element["title"] for element in shown[: len(TOKENS)]] == [f"tip {token}" for token in expected]


def test_whitespace_and_control_characters_have_a_sign() -> None:
    page = Page(render(Document("t", [Tokens([Token(" a\n\t\u202e\x1b")])]), "html"))
    assert [(e["text"], e["data-sign"]) for e in page.all("i")] == [
        (" ", "·"),
        ("\n", "⏎"),
        ("\t", "→"),
        ("\u202e", "\\u{202e}"),
        ("\x1b", "␛"),
    ]


def test_the_numbers_travel_in_the_page(page: Page) -> None:
    assert json.loads(page.all("script")[0]["text"]) == {"prompt": HOSTILE, "tokens": TOKENS}


def test_titles_and_paragraphs_say_what_was_given(page: Page) -> None:
    assert page.all("title")[0]["text"] == HOSTILE
    assert page.all("h1")[0]["text"] == HOSTILE
    assert page.all("p", "warning")[0]["text"] == HOSTILE
    assert page.all("code")[0]["text"] == HOSTILE


def test_the_page_asks_for_nothing(page: Page) -> None:
    text = render(everything(), "html", data={"prompt": HOSTILE})
    assert (
        re.findall(r"""(?:src|href|action|srcset)\s*=\s*["'](?!#)[^"']*""", re.sub(r"data-token=\"[^\"]*\"", "", text))
        == []
    )
    assert "url(" not in text
    assert "@import" not in text
    policy = [e["content"] for e in page.all("meta") if e.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_plots_have_axes_units_and_titles() -> None:
    plot = LinePlot(
        "The title", "tokens", "time", [Series("on", [1.0, 2.0], [1, 2]), Series("off", [3.0], [2])], y_unit="ms"
    )
    page = Page(render(Document("t", [plot]), "html"))
    assert page.all("figcaption")[0]["text"] == "The title"
    wide, narrow = page.all("svg")
    for drawing in (wide, narrow):
        assert drawing["role"] == "img"
        assert "The title" in drawing["aria-label"]
        assert "time (ms)" in drawing["text"]
        assert "tokens" in drawing["text"]
        assert "on: 1 ms at 1" in drawing["text"]
    assert page.all("line", "axis")


def test_numbers_in_plots_are_numbers() -> None:
    text = render(everything(), "html")
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^"]*"', re.sub(r'(data-token|title|aria-label)="[^"]*"', "", text))


def test_a_heat_map_can_hide_its_first_column_without_a_script() -> None:
    plot = HeatMap("m", "q", "k", "w", ["a"], ["first", "second"], [[0.9, 0.1]], can_hide_first=True)
    page = Page(render(Document("t", [plot]), "html"))
    toggle = page.all("input")[0]
    assert toggle["type"] == "checkbox"
    assert [label["for"] for label in page.all("label")] == [toggle["id"]]
    assert "first" in page.all("div", "with")[0]["text"]
    assert "first" not in page.all("div", "without")[0]["text"]


def test_a_chinese_page_says_so() -> None:
    page = Page(render(Document("标题", [Text("正文")], language="zh"), "html"))
    assert page.all("html")[0]["lang"] == "zh-CN"


def test_whitespace_in_a_cell_can_be_seen_and_sentences_are_left_alone() -> None:
    page = Page(render(Document("t", [Table(["token"], [[" the"], ["\n\n"], ["a plain sentence"]])]), "html"))
    assert [cell["text"] for cell in page.all("td")] == [" the", "\n\n", "a plain sentence"]
    assert [e["data-sign"] for e in page.all("i")] == ["·", "⏎", "⏎"]
