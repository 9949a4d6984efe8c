"""The command line: options, errors and exit codes, and the verbs that need no model to speak."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import cutaway.cli
from cutaway.cli import VERBS, application
from cutaway.cli.options import ModelOptions, SamplingOptions, bias, carried_settings, command, unescape
from cutaway.engine.sampling import SamplingParams
from cutaway.errors import CutawayError, RequestError


def cutaway_process(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cutaway", *arguments], capture_output=True, text=True, encoding="utf-8", **more
    )


# -- the frame -----------------------------------------------------------------------------------------------------


def test_version_imports_neither_typer_nor_numpy():
    code = (
        "import sys; from cutaway.cli import main; main(['--version'])\n"
        "assert not {'typer', 'numpy', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"cutaway {cutaway.__version__} ")
    assert done.stderr == ""


def test_a_verb_imports_only_its_own_module():
    code = (
        "import sys; from cutaway.cli import application\napplication('models')\n"
        "assert not {'cutaway.cli.run', 'numpy', 'rich', 'jinja2', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb):
    result = CliRunner().invoke(application(verb), [verb, "--help"])
    assert result.exit_code == 0
    assert verb in result.output


def test_wrong_usage_exits_2_and_keeps_stdout_clean():
    for arguments in (["nothing"], ["run", "--no-such-option"], ["inspect", "a", "b"]):
        done = cutaway_process(*arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr


def test_no_verb_shows_the_help():
    done = cutaway_process()
    assert "inspect" in done.stdout + done.stderr


# -- command -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    left: Annotated[int, typer.Option("--left")] = 1
    right: Annotated[str | None, typer.Option("--right")] = None


def run_verb(function, *arguments: str):
    app = typer.Typer()
    app.command()(command(function))
    return CliRunner().invoke(app, list(arguments))


def test_a_group_of_options_unfolds_and_folds_back():
    seen = []

    def verb(pair: Pair, word: Annotated[str, typer.Argument()], loud: Annotated[bool, typer.Option("--loud")] = False):
        """Say."""
        seen.append((pair, word, loud))

    assert run_verb(verb, "hi", "--left", "3", "--loud").exit_code == 0
    assert run_verb(verb, "--right", "r", "ho").exit_code == 0
    assert seen == [(Pair(3, None), "hi", True), (Pair(1, "r"), "ho", False)]


def test_a_known_error_is_one_line_and_exit_1():
    def verb():
        raise CutawayError("what", found="a\nb", hint="this")

    result = run_verb(verb)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "cutaway: error: what: found a b (hint: this)\n"


def test_ctrl_c_is_one_line_and_exit_130(monkeypatch):
    def verb():
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    result = run_verb(verb)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "cutaway: stopped\n")


def test_an_unknown_error_is_not_hidden():
    def verb():
        raise ZeroDivisionError

    assert isinstance(run_verb(verb).exception, ZeroDivisionError)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize(("lines", "reader"), [(100_000, "head -n 1"), (1, "true")])
def test_a_reader_that_goes_away_ends_the_program_quietly_as_sigpipe_would(lines, reader):
    code = (
        "import sys, time; from cutaway.cli.options import command; from cutaway.cli.streams import prepare\n"
        "prepare()\n"
        "def verb():\n"
        "    time.sleep(0.3)\n"
        f"    for _ in range({lines}): sys.stdout.write('line\\n')\n"
        "command(verb)()"
    )
    shell = f'set -o pipefail; "{sys.executable}" -c "$CODE" | {reader}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env={**os.environ, "CODE": code})
    assert (done.returncode, done.stderr) == (141, "")


# -- options -------------------------------------------------------------------------------------------------------


def test_only_what_was_asked_for_reaches_the_llm():
    assert ModelOptions().arguments() == {}
    asked = ModelOptions(model="m", threads=2, k_type="q8_0", no_kv_cache=True, no_prefix_cache=True).arguments()
    assert asked == {"threads": 2, "k_type": "q8_0", "kv_cache": False, "prefix_cache": False}


def test_settings_say_where_they_came_from():
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [1]}
    given = SamplingOptions(temperature=0.2, stop=["\\n", "a\\\\n"], logit_bias=["7=-1.5"], ignore_eos=True)

    settings = given.resolve(generation)
    assert set(settings) == {field.name for field in fields(SamplingParams)}
    assert (settings["temperature"].value, settings["temperature"].origin) == (0.2, "flag")
    assert (settings["top_k"].value, settings["top_k"].origin) == (0, "default")  # never applied in silence
    assert settings["stop"].value == ("\n", "a\\n")
    assert settings["logit_bias"].value == {7: -1.5}
    assert settings["ignore_eos"].value is True

    settings = SamplingOptions(temperature=0.2, settings_from="model").resolve(generation)
    assert (settings["temperature"].value, settings["temperature"].origin) == (0.2, "flag")
    assert (settings["top_k"].value, settings["top_k"].origin) == (20, "model")
    assert (settings["repetition_penalty"].value, settings["repetition_penalty"].origin) == (1.1, "model")
    assert (settings["top_p"].value, settings["top_p"].origin) == (1.0, "default")
    assert settings["seed"].origin == "default"


def test_settings_from_takes_only_model():
    with pytest.raises(RequestError, match="expected model"):
        SamplingOptions(settings_from="modle").check()


def test_what_files_carry_under_our_names():
    assert carried_settings({"general.sampling.temp": 0.5, "penalty_repeat": 1.2, "top_k": None, "other": 1}) == {
        "temperature": 0.5,
        "repetition_penalty": 1.2,
    }
    assert carried_settings({"do_sample": False, "temperature": 0.9}) == {"temperature": 0.0}


@pytest.mark.parametrize("text", ["", "7", "7=", "a=1", "7=x"])
def test_a_wrong_logit_bias_is_named(text):
    with pytest.raises(RequestError, match="ID=BIAS"):
        bias(text)


def test_escapes():
    assert unescape(r"a\n\t\\n\x" + "\\") == "a\n\t\\n\\x\\"
