"""The documents of trace, diff, score and compare: what they say, and that every backend can show them."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from fake_llm import FakeLLM
from tiny import TINY

from cutaway.experiments.compare import Condition, compare
from cutaway.experiments.diff import diff, diff_models
from cutaway.experiments.score import perplexity, score
from cutaway.experiments.table import operation_table
from cutaway.experiments.trace import trace
from cutaway.forward.program import Program
from cutaway.render import render
from cutaway.render.document import Document, HeatMap, Language, LinePlot, Table, Text, Tokens
from cutaway.render.views import compare as compare_view
from cutaway.render.views import diff as diff_view
from cutaway.render.views import score as score_view
from cutaway.render.views import trace as trace_view

HOSTILE = """a<b & "c" </script><script>x()</script> "><img src=q onerror=x()> <s> &amp; """


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


def blocks(document: Document, kind: type) -> list[Any]:
    return [block for block in document.blocks if isinstance(block, kind)]


def everything(prompt: str) -> dict[str, tuple[Any, Callable[[Any, Language], Document]]]:
    """Every result over a prompt, with the view that shows it."""
    llm, other = FakeLLM(), FakeLLM(format="Q8_0", name=HOSTILE)
    a, b = Condition(llm, HOSTILE, chat=False), Condition(other, "b", chat=False)
    return {
        "trace": (trace(llm, prompt, ["layers.*"], attention=[(0, 1)]), trace_view.trace),
        "diff": (diff_models(llm, other, prompt), diff_view.diff),
        "score": (score(llm, prompt), score_view.score),
        "perplexity": (perplexity(llm, prompt, 8), score_view.perplexity),
        "compare": (compare(a, b, prompt, max_tokens=5, text=prompt, window=8), compare_view.compare),
    }


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_backend_shows_every_result(language: Language) -> None:
    for name, (result, view) in everything("Hello, world").items():
        document = view(result, language)
        assert document.language == language
        lines = render(document, "terminal", width=80).splitlines()
        assert all(line.isprintable() for line in lines), name
        if language == "en":
            assert max(map(len, lines)) <= 80, name
        assert render(document, "md")
        assert "<html" in render(document, "html", data=result)
        assert json.loads(render(document, "json", data=result))


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_text_of_models_is_escaped() -> None:
    harmless, hostile = everything("a" * len(HOSTILE)), everything(HOSTILE)
    for name, (result, view) in hostile.items():
        page, plain = Elements(), Elements()
        page.feed(render(view(result, "en"), "html", data=result))
        plain.feed(render(view(harmless[name][0], "en"), "html", data=harmless[name][0]))
        assert "img" not in page.seen, name
        assert page.seen.count("script") == plain.seen.count("script"), name


def test_trace_says_what_it_must(llm: FakeLLM) -> None:
    result = trace(llm, "Hello, world", ["layers.0.mlp.down"], attention=[(1, 0), (1, 3)], attention_rows=[4, 11])
    document = trace_view.trace(result)
    assert [token.text for token in blocks(document, Tokens)[0].tokens] == list("Hello, world")
    text = render(document, "terminal")
    for expected in (
        "layers.*.attn.q",
        "self_attn.q_proj",
        "[12, 64]",
        "lm_head",
        "layers 0 to 1",
        "layers.0.mlp.down",
    ):
        assert expected in text
    costs = blocks(document, Table)[2]
    by_name = {row[0]: row for row in costs.rows}
    assert by_name["layers.*.mlp.up"][2] == 2 * 96 * 64 * 4  # both layers
    assert by_name["all"][2] == sum(row.weight_bytes + row.kv_bytes for row in result.table)
    first, second = blocks(document, HeatMap)[-2:]
    assert (first.title, second.title) == ("Layer 1, head 0", "Layer 1, head 3")
    assert first.rows == ["4 o", "11 d"]
    assert first.values[0][5] is None  # a later token
    assert first.values[1][11] == pytest.approx(result.attention[0].weights[0, 1, 11])
    assert first.can_hide_first
    plot = blocks(document, LinePlot)[0]
    assert list(plot.series[0].x) == [0.0, 0.5, 1.0, 1.5, 2.0]
    np.testing.assert_allclose(plot.series[0].y, result.residual.norms[:, -1])


def test_all_layers_have_rows_of_their_own_when_asked(llm: FakeLLM) -> None:
    result = trace(llm, "Hi", lens_positions=None)
    shapes = trace_view.trace(result, "en", True).blocks[3]
    assert isinstance(shapes, Table)
    assert [row[0] for row in shapes.rows] == llm.program.names
    assert "model.layers.1.self_attn.q_proj" in [row[1] for row in shapes.rows]


def test_what_an_operation_is_told_stands_behind_its_name() -> None:
    program = Program(TINY)
    x = program.embed("embed", "model.embed_tokens")
    for index, window in enumerate((None, 4096, None)):
        with program.layer(index):
            x = program.attention("attn.mix", x, x, x, window=window, softcap=50.0)
    table = trace_view.shape_table(operation_table(program, {}, positions=[0], num_outputs=1))
    names = ["embed", "layers.*.attn.mix (softcap=50.0)", "layers.*.attn.mix (softcap=50.0, window=4096)"]
    assert [row[0] for row in table.rows] == names


def test_times_are_shown_where_they_were_taken(llm: FakeLLM) -> None:
    def costs(profile: list[tuple[list[str], int]]) -> Table:
        rows = operation_table(llm.program, llm.checkpoint.weights, positions=[0], num_outputs=1, profile=profile)
        return trace_view.cost_table(rows)

    assert "time" not in [column.name for column in costs([]).columns]
    table = costs([(["layers.0.attn.q"], 3000), (["layers.1.attn.q"], 1000), (["logits"], 4000)])
    by_name = {row[0]: row for row in table.rows}
    assert by_name["layers.*.attn.q"][4:] == [4e-6, 0.5]
    assert by_name["all"][4:] == [8e-6, 1.0]
    assert by_name["embed"][4:] == [None, None]


def test_a_fused_groups_time_belongs_to_its_heaviest_operation(llm: FakeLLM) -> None:
    profile = [(["layers.0.mlp.down", "layers.0.residual"], 3000), (["layers.0.attn_norm", "layers.0.attn.q"], 1000)]
    rows = operation_table(llm.program, llm.checkpoint.weights, positions=[0], num_outputs=1, profile=profile)
    plot = trace_view.share_plot(rows)
    shares = dict(zip(plot.categories, plot.series[2].y, strict=True))
    assert (shares["MLP matrices"], shares["attention matrices"]) == (0.75, 0.25)
    for series in plot.series:
        assert sum(y for y in series.y if y) == pytest.approx(1)


def test_trace_of_one_token(llm: FakeLLM) -> None:
    document = trace_view.trace(trace(llm, "H"))
    assert [series.name for series in blocks(document, LinePlot)[0].series] == ["last token"]
    assert document.subtitle == "tiny, 1 token"


def test_trace_as_json_leaves_the_tensors_out(llm: FakeLLM) -> None:
    data = json.loads(render(Document(""), "json", data=trace(llm, "Hi", ["*"])))
    assert "tensors" not in data
    assert data["ids"] == llm.tokenize("Hi")


def test_diff_answers_first(llm: FakeLLM) -> None:
    def answer(**arguments: Any) -> Text:
        tensors = {"embed": np.ones((2, 2)), "logits": np.ones((2, 2))}
        other = {**tensors, **arguments.pop("other", {})}
        found = diff_view.diff(diff(llm.program, tensors, other, **arguments)).blocks[0]
        assert isinstance(found, Text)
        return found

    assert answer().text == "Every tap is the same, bit for bit."
    departed = answer(other={"logits": np.array([[1.0, 1.0], [1.0, 3.0]])})
    assert departed.tone == "warning"
    assert "first tap that departs is logits: 1 relative (tolerance 0.001), at most 2, in token 1." in departed.text
    assert "no tap departs" in answer(other={"logits": np.full((2, 2), 1 + 1e-6)}).text.lower()
    assert "another shape: (2, 2) against (3, 2)" in answer(other={"embed": np.ones((3, 2))}).text
    assert "holds 1 NaN values, first in token 1" in answer(other={"embed": np.array([[1, 1], [1, np.nan]])}).text


def test_score_colours_each_token(llm: FakeLLM) -> None:
    result = score(llm, "Hello")
    tokens = blocks(score_view.score(result), Tokens)[0].tokens
    assert [token.value for token in tokens] == [token.logprob for token in result.tokens]
    assert f"rank {result.tokens[2].rank}" in tokens[2].tooltip
    assert "nothing to judge" in render(score_view.score(score(llm, "H")))


def test_perplexity_has_the_familiar_line(llm: FakeLLM) -> None:
    result = perplexity(llm, "Hello, world", 8)
    assert f"{result.ppl:.4f} +/- {result.ppl_error:.5f}" in render(score_view.perplexity(result))
    llama = perplexity(llm, "Hello, world", 8, rule="llama.cpp")
    assert "llama-perplexity" in render(score_view.perplexity(llama))


def test_compare_shows_warnings_first_and_the_same_tokens(llm: FakeLLM) -> None:
    runs_on = FakeLLM()
    runs_on.checkpoint.eos_ids = frozenset({5})
    result = compare(Condition(runs_on, "chat"), Condition(llm, "raw", chat=False), "Hi", max_tokens=4)
    document = compare_view.compare(result)
    assert isinstance(document.blocks[0], Text)
    assert document.blocks[0].tone == "warning"
    titles = [plot.title for plot in blocks(document, LinePlot)]
    assert titles == ["How far apart the two distributions are", "P(end of turn)"]
    assert [len(series.y) for series in blocks(document, LinePlot)[1].series] == [4, 4, 4, 4]
    tables = blocks(document, Table)[-2:]
    assert [[row[1] for row in table.rows] for table in tables] == [list(run.texts) for run in result.forced]


def test_compare_of_different_vocabularies_shows_what_is_left(llm: FakeLLM) -> None:
    foreign = FakeLLM(seed=2)
    foreign.tokenizer.control_tokens = {"<other>": 3}
    result = compare(
        Condition(llm, "a"), Condition(foreign, "b", chat=False), "Hi", max_tokens=3, text="Hello", window=4
    )
    document = compare_view.compare(result)
    assert [plot.title for plot in blocks(document, LinePlot)] == ["P(end of turn)"]
    text = render(document)
    assert "different vocabularies" in text
    assert "bits per byte" in text
    assert "perplexity " not in text
