"""Wrong usage is found before anything is opened: every numeric option of every verb, walked from the options."""

from __future__ import annotations

import inspect
import io
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cutaway.cli import application, loading, main
from cutaway.files import checkpoint, store

FILLING = {"compare": ["m", "-p", "x"], "diff": ["m", "-p", "x"], "perplexity": ["/no/such/text"]}


def verbs(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for command in app.registered_commands:
        yield (*path, str(command.name)), command.callback
    for group in app.registered_groups:
        yield from verbs(typing.cast(typer.Typer, group.typer_instance), (*path, str(group.name)))


def options() -> Iterator[tuple[tuple[str, ...], str, type, Any]]:
    """Verb, spelling, type and typer's own description of each option that takes a value."""
    for path, verb in verbs(application()):
        for parameter in inspect.signature(verb).parameters.values():
            annotation, info = typing.get_args(parameter.annotation)[:2]
            kinds = {annotation, *typing.get_args(annotation)} | {
                inner for kind in typing.get_args(annotation) for inner in typing.get_args(kind)
            }
            names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
            names = [name for name in names if name.startswith("-")]
            kind = next((k for k in (bool, int, float, str) if k in kinds), None)
            if names and kind not in (bool, None):
                yield path, names[0], typing.cast(type, kind), info


NUMERIC = [(path, name, kind) for path, name, kind, _ in options() if kind in (int, float)]
MANY = ["--n-prompt", "--n-gen", "--n-depth", "--threads", "--batch-size", "--ubatch-size"]  # of bench: texts
NUMERIC += [(("bench",), name, int) for name in MANY]
SIGNED = {"--presence-penalty", "--frequency-penalty", "--seed", "--top-k"}  # -1 means something


def wrong(kind: type, name: str) -> list[str]:
    values = ["x", "1e", "99999999999999999999999999", "nan", "inf", "-inf", "-99999999999999999999999999"]
    if kind is int:
        values.append("1.5")
    if name not in SIGNED:
        values.append("-1")
    return [v for v in values if not (kind is float and v[-4:] == "9999" and v[0] != "-")]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a verb that must be refused as wrong usage, in one line, before a model is asked for."""
    for place, name in ((loading, "locate"), (store, "resolve"), (checkpoint, "load")):
        monkeypatch.setattr(place, name, lambda *a, **k: pytest.fail("a model was asked for"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"some text")))

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capsys.readouterr()
        assert (end.value.code, out, err.count("\n")) == (2, "", 1), (arguments, out, err)
        assert err.startswith("cutaway: error: ")
        return err

    return run


def test_the_walk_finds_the_options() -> None:
    assert len(NUMERIC) > 80
    assert (("run",), "--temperature", float) in NUMERIC
    assert (("kv", "quality"), "--limit", int) in NUMERIC


@pytest.mark.parametrize(("path", "name", "kind"), NUMERIC, ids=lambda x: " ".join(x) if isinstance(x, tuple) else None)
def test_a_number_that_is_none_is_wrong_usage(refused: Any, path: tuple[str, ...], name: str, kind: type) -> None:
    for value in wrong(kind, name):
        refused(*path, *FILLING.get(path[0], []), f"{name}={value}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "x", "--threads", "100000"], "1024"),
        (["run", "x", "--threads", "0"], "--threads"),
        (["run", "x", "--kv-type", "q4_0"], "q8_0"),
        (["run", "x", "--activations", "int4"], "int8 or f32"),
        (["run", "x", "--interpreter", "cuda"], "native or reference"),
        (["run", "x", "--stop", ""], "stop"),
        (["run", "x", *["--stop", "y"] * 17], "stop"),
        (["run", "x", "--top-p", "1.5"], "top_p"),
        (["run", "x", "--repetition-penalty", "0"], "repetition_penalty"),
        (["run", "x", "--logit-bias", "7=nan"], "logit_bias"),
        (["run", "x", "--logit-bias", "a=1"], "ID=BIAS"),
        (["run", "x", "--dialect", "ollama"], "dialect"),
        (["run", "x", "--n", "129"], "128"),
        (["run", "x", "--settings-from", "me"], "settings-from"),
        (["chat", "--temperature", "-1"], "temperature"),
        (["chat", "--n", "2"], "--n"),
        (["run", "a\udcff"], "a wrong byte at offset 1"),
        (["run", "x", "--system", "线\udcff"], "a wrong byte at offset 3"),
        (["run", "x", "--stop", "\udcff"], "--stop"),
        (["run", "--raw", "--system", "s", "x"], "--raw"),
        (["bench", "-p", "1-99999999999"], "-p"),
        (["bench", "-p", "1-100000"], "more than 1000"),
        (["bench", "-n", "5-1"], "never arrives"),
        (["bench", "-ctk", "q4_0"], "q8_0"),
        (["bench", "-ctv", ","], "-ctv"),
        (["bench", "--activations", "f64"], "int8 or f32"),
        (["bench", "-p", "0", "-n", "0"], "nothing to run"),
        (["compare", "m", "-p", "x", "--a", "threads=0"], "--a threads"),
        (["compare", "m", "-p", "x", "--b", "temperature=-1"], "temperature"),
        (["compare", "m", "-p", "x", "--b", "temperature=nan"], "temperature"),
        (["compare", "m", "-p", "x", "--b", "max_context=99999999999"], "max_context"),
        (["diff", "m", "-p", "x", "--b", "kv_type=q4_0"], "q4_0"),
        (["diff", "m", "-p", "x", "--b", "chunk=0"], "chunk"),
        (["trace", "x", "--attention", "-1"], "--attention"),
        (["trace", "x", "--attention", "99999999999999"], "--attention"),
        (["trace", "x", "--save", "x.pkl"], "x.pkl"),
        (["perplexity", "x", "--rule", "mine"], "--rule"),
        (["tune", "threads", "--try", "0"], "--try"),
        (["tune", "threads", "--try", "99999"], "--try"),
        (["kv", "quality", "--prompt", "x", "--types", "f16/f17"], "f17"),
        (["kv", "plan", "--v-type", "f8"], "f8"),
        (["report", "x", "--lang", "xx"], "en or zh"),
        (["score", "x", "-o", "x.pdf"], "x.pdf"),
        (["sample", "x", "--temperatures", "0.3,nan"], "temperature"),
    ],
)
def test_a_value_out_of_range_is_wrong_usage(refused: Any, arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


@pytest.mark.parametrize("verb", ["trace x", "sample x", "score x", "report x", "kv plan", "kv bench x", "profile"])
@pytest.mark.parametrize(
    ("place", "says"), [("none/x.html", "no such folder"), (".", "no output format"), ("d.md", "a folder")]
)
def test_where_a_result_goes_is_known_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    verb: str,
    place: str,
    says: str,
) -> None:
    monkeypatch.setattr(loading, "locate", lambda *a: pytest.fail("a model was asked for"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.md").mkdir()
    with pytest.raises(SystemExit) as end:
        main([*verb.split(), "-o", place])
    err = capsys.readouterr().err
    assert end.value.code == (2 if place == "." else 1)
    assert says in err
    assert err.count("\n") == 1
