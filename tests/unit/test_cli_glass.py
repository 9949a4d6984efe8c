"""The verbs kv, sample and report on a tiny model: forms, files, languages, and errors before any work."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from glass_llm import HEAD_32, GlassLLM
from typer.testing import CliRunner

from cutaway import render
from cutaway.cli import application, loading, main

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a verb on the tiny model."""
    monkeypatch.setattr(loading, "open_model", lambda options: GlassLLM())
    monkeypatch.setattr(loading, "locate", lambda model: Path("tiny.gguf"))
    found = SimpleNamespace(config=HEAD_32, nbytes=1 << 20, name="tiny")
    monkeypatch.setattr("cutaway.files.checkpoint.load", lambda path: found)

    def verb(*arguments: str, **more: object) -> Result:
        return CliRunner().invoke(application(arguments[0]), list(arguments), **more)

    return verb


FAST = ["--lengths", "4,8"]


@pytest.mark.parametrize(
    ("arguments", "says", "key"),
    [
        (["kv", "plan", "--context", "64"], "2 x 2 x 2 x 32 x 2 B = 512 B", "bytes_per_token"),
        (["kv", "bench", "hello", *FAST], "Why Q is not cached", "rates"),
        (["kv", "quality", "--prompt", "hello", "--types", "f16,q8_0/f16"], "q8_0 / f16", "rows"),
        (["sample", "hello", "--temperature", "1", "--seed", "1", "--max-tokens", "3"], "mass removed", "steps"),
        (["sample", "hello", "--temperatures", "0.3,1.5", "--max-tokens", "3"], "distinct-2", "rows"),
        (["sample", "hello", "--dialects", "all", "--temperature", "1.5", "--top-p", "0.9"], "llama.cpp", "rows"),
        (["report", "hello", "--tokens", "4", *FAST], "The command that makes this again", "bench"),
    ],
)
def test_a_verb_speaks_in_the_terminal_and_in_json(run: Run, arguments: list[str], says: str, key: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 0, shown.output
    assert says in " ".join(shown.stdout.split())
    data = run(*arguments, "--json")
    assert data.exit_code == 0
    assert key in json.loads(data.stdout)


def test_the_suffix_of_the_file_chooses_the_form(run: Run, tmp_path: Path) -> None:
    for suffix, start in ((".html", "<!doctype html>"), (".md", "# Memory"), (".json", "{"), (".txt", "Memory")):
        path = tmp_path / f"plan{suffix}"
        done = run("kv", "plan", "--context", "64", "-o", str(path))
        assert done.exit_code == 0
        assert done.stdout == ""
        assert f"wrote {path}" in done.stderr
        assert path.read_text("utf-8").startswith(start)
    page = run("kv", "plan", "--context", "64", "--html")
    assert page.stdout.startswith("<!doctype html>")


def test_a_png_holds_the_plots(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run("kv", "plan", "--context", "64", "-o", str(tmp_path / "plan.png")).exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_chinese_on_request(run: Run) -> None:
    assert "可用内存" in run("kv", "plan", "--context", "64", "--lang", "zh").stdout
    assert "可用内存" in run("kv", "plan", "--context", "64", env={"CUTAWAY_LANG": "zh_CN.UTF-8"}).stdout


def test_origins_of_settings_are_shown(run: Run) -> None:
    text = run("sample", "hello", "--temperature", "0.5", "--max-tokens", "2", "--md").stdout
    assert "| temperature | 0.5 | flag |" in text
    assert "| top\\_p | 1.0 | default |" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["kv", "plan", "-o", "/no/such/folder/x.html"], "no such folder"),
        (["kv", "quality", "/no/such/text.txt"], "cannot read"),
        (["report", "a", "--lengths", "4,5000"], "fit the context"),
    ],
)
def test_a_fault_is_one_line_and_status_1(run: Run, arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cutaway: error: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["kv", "plan", "--json", "--md"], "more than one form"),
        (["kv", "plan", "--png"], "-o FILE.png"),
        (["kv", "plan", "-o", "x.pdf"], "x.pdf"),
        (["kv", "plan", "--lang", "fr"], "en or zh"),
        (["kv", "plan", "--context", "0"], "--context"),
        (["kv", "plan", "--kv-type", "q4_0"], "q4_0"),
        (["kv", "quality", "--prompt", "a", "--types", "q4_0"], "q4_0"),
        (["sample", "a", "--dialects", "ollama"], "dialect"),
        (["sample", "a", "--top-p", "2"], "top_p"),
        (["kv", "bench", "a", "--lengths", "1"], "lengths"),
        (["kv", "bench", "a", "--lengths", "x"], "lengths"),
        (["sample", "a", "--temperatures", "x"], "temperatures"),
        (["sample", "a", "--temperatures", "0.3,x"], "0.3,x"),
        (["sample", "a", "--temperatures", "0.3,-1"], "temperature"),
        (["sample", "a", "--temperatures", ","], "temperatures"),
        (["sample", "a", "--dialects", "hf,ollama"], "ollama"),
        (["sample", "a", "--continuations", "0"], "continuations"),
        (["kv", "quality", "--prompt", "a", "--types", "f16,q4_0"], "q4_0"),
        (["kv", "bench", "a", "--lengths", "64,1"], "lengths"),
        (["report", "a", "--lengths", "64,1"], "lengths"),
        (["report", "a", "--lengths", ","], "lengths"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    monkeypatch.setattr(loading, "locate", lambda model: pytest.fail("a model was asked for"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("cutaway: error: ")
    assert complaint in err


@pytest.mark.parametrize("verb", ["trace", "sample", "kv plan", "kv bench", "compare", "score", "report", "profile"])
def test_a_png_without_matplotlib_is_refused_before_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    monkeypatch.setattr(render, "find_spec", lambda name: None)
    monkeypatch.setattr(loading, "open_model", lambda options: pytest.fail("a model was loaded"))
    monkeypatch.setattr("cutaway.cli.conditions.open_sides", lambda *a: pytest.fail("a model was loaded"))
    done = run(*verb.split(), *([] if verb in ("kv plan", "profile") else ["a"]), "-o", str(tmp_path / "x.png"))
    assert done.exit_code == 1
    assert "matplotlib" in done.stderr
