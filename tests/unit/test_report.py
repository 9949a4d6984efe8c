"""The report: all parts, in both languages, with commands that the command line understands."""

from __future__ import annotations

import json
import shlex

import pytest
import typer
from glass_llm import GlassLLM
from rich.cells import cell_len

from cutaway.cli import VERBS, application
from cutaway.errors import ContextLengthError
from cutaway.experiments.report import Report, Settings, report
from cutaway.render import render
from cutaway.render.document import Code, Heading, LinePlot
from cutaway.render.views import report as view

SHORT = Settings(tokens=6, lengths=(4, 8), continuations=2, temperatures=(0.2, 1.5))
PROMPT = "it's <b>quick</b> & 'brown'"


@pytest.fixture(scope="module")
def made() -> Report:
    return report(GlassLLM(), PROMPT, SHORT, model_argument="./my model.gguf")


def test_it_holds_every_experiment(made: Report) -> None:
    assert made.bench.same
    assert made.stability.same
    assert (made.stability.runs, made.stability.tokens) == (3, 6)
    assert made.comparison is not None
    assert [row.temperature for row in made.temperatures.rows] == [0.2, 1.5]
    assert made.temperatures.rows[0].entropy_nats < made.temperatures.rows[1].entropy_nats
    assert made.plan.kv_bytes == 2048 * made.plan.bytes_per_token
    assert made.trace.texts == tuple(PROMPT)
    assert made.seconds > 0


def test_generations_go_through_the_template_and_the_trace_does_not(made: Report) -> None:
    assert made.bench.prompt_tokens == len(GlassLLM().chat_ids([{"role": "user", "content": PROMPT}]))
    assert len(made.trace.ids) == len(PROMPT)


def test_a_model_without_a_template_has_no_comparison() -> None:
    llm = GlassLLM()
    llm.chat_template = None
    found = report(llm, "hello", SHORT)
    assert found.comparison is None
    assert found.bench.prompt_tokens == 5
    assert "chat template" not in [b.text for b in view.report(found).blocks if isinstance(b, Heading)]


def test_every_command_is_one_the_command_line_takes(made: Report) -> None:
    for text in made.commands.values():
        program, verb, *rest = shlex.split(text)
        assert program == "cutaway"
        assert verb in VERBS
        found = typer.main.get_command(application(verb))
        for name in (verb, *rest):
            if not hasattr(found, "commands"):
                break
            found = found.commands[name]
            rest = rest if name == verb else rest[1:]
        context = found.make_context(verb, list(rest))  # raises for an option that is not there
        if "prompt" in context.params:
            assert context.params["prompt"] == PROMPT
        named = context.params.get("model") or context.params.get("a")
        assert named == "./my model.gguf"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_part_ends_with_its_command(made: Report, language: str) -> None:
    document = view.report(made, language)
    shown = [block.text for block in document.blocks if isinstance(block, Code) and block.language == "sh"]
    assert sorted(shown) == sorted(made.commands.values())
    assert sum(isinstance(block, LinePlot) for block in document.blocks) >= 5


def test_every_form(made: Report) -> None:
    english, chinese = view.report(made), view.report(made, "zh")
    assert json.loads(render(english, "json", data=made))["stability"]["same"] is True
    assert "# A model with its side cut open: tiny" in render(english, "md")
    assert "剖开一个模型" in render(chinese, "html", data=made)
    for document in (english, chinese):
        assert max(map(cell_len, render(document, "terminal").split("\n"))) <= 80


def test_what_does_not_fit_is_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutaway.experiments.report.trace", lambda *a, **k: pytest.fail("work was done"))
    with pytest.raises(ContextLengthError, match="500 tokens"):
        report(GlassLLM(), "hello", Settings(lengths=(64, 500)))
