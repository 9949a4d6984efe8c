"""The READMEs: their links lead somewhere, their facts are the package's, their code and commands run."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cutaway.files.store import CATALOGUE, DEFAULT, installed
from cutaway.forward.native import isas
from cutaway.render.numbers import size

ROOT = Path(__file__).parents[2]
READMES = ["README.md", "README.zh-CN.md"]
PAGES = [*READMES, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)


def cases(language: str) -> list:
    return [pytest.param(block, id=f"{page}-{n}") for page in READMES for n, block in enumerate(blocks(page, language))]


def need_models() -> None:
    missing = set(CATALOGUE) - {model.name for model in installed()}
    if missing:
        pytest.skip(f"not downloaded: {', '.join(sorted(missing))} (cutaway pull)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", text_of(page)):
        if not target.startswith("https://"):
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", READMES)
def test_the_table_of_models_is_the_catalogue(page):
    rows = re.findall(r"^\| `([\w.-]+)`.*$", text_of(page), re.MULTILINE)
    assert rows == list(CATALOGUE)
    for entry in CATALOGUE.values():
        row = next(line for line in text_of(page).splitlines() if line.startswith(f"| `{entry.name}`"))
        assert size(round(entry.file_bytes / 2**20) * 2**20) in row
        assert entry.licence in row
        assert ("default" in row or "默认" in row) == (entry.name == DEFAULT)
        for part in entry.parts[:1]:
            assert part.requirement.partition("==")[0] in row


@pytest.mark.parametrize("page", READMES)
def test_two_command_lines_install_and_run(page):
    lines = "".join(blocks(page, "console")).splitlines()
    assert lines == [
        'pip install . && cutaway run "用一句话介绍什么是 Transformer。"',
        'pip install ".[dev]" && pytest',
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_the_command_line_takes(page):
    """Parsed, not run: `--help` after the options makes typer check the verb, and each option must be in its help."""
    for line in re.findall(r"(?:^|[`&$]) ?(cutaway [a-z][^`\n|]*)", text_of(page), re.MULTILINE):
        words = shlex.split(line.partition(" && ")[0], comments=True)
        if words[1] in ("VERB",) or page == "docs/cli.md":
            continue
        verb = words[1:3] if words[1] in ("kv", "tune") else words[1:2]  # those have verbs of their own
        help = subprocess.run([sys.executable, "-m", "cutaway", *verb, "--help"], capture_output=True, text=True)
        assert help.returncode == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in help.stdout, line


@pytest.mark.parametrize("page", READMES)
def test_the_speed_table_is_what_was_measured(page):
    maker = runpy.run_path(str(ROOT / "docs" / "make_readme.py"))
    assert "OUTPUT" not in text_of(page)
    if not maker["SAVED"].exists():
        pytest.skip("no saved run of benchmarks/versus.py")
    table = maker["speed"](json.loads(maker["SAVED"].read_text("utf-8")), maker["WORDS"][page])
    assert maker["fill"](text_of(page), "speed", table) == text_of(page), "run: python docs/make_readme.py speed"


def test_a_saved_run_as_a_table():
    maker = runpy.run_path(str(ROOT / "docs" / "make_readme.py"))
    saved = {
        "date": "2026-01-02",
        "machine": {"cpu": "CPU", "read_bandwidth": {"2": 30e9}},
        "settings": {"threads": 2, "rounds": 3},
        "models": {
            "m": {
                "versions": {
                    "cutaway": "cutaway 0.1.0",
                    "llama.cpp fa": "llama-cpp-python b1 (SSE3)",
                    "llama.cpp": "llama-cpp-python b1 (SSE3)",
                },
                "samples": {
                    "decode": {"cutaway": [60, 70, 80], "llama.cpp fa": [35], "llama.cpp": [30], "x": []},
                    "first_token": {"cutaway": [0.5], "llama.cpp": [1.25], "llama.cpp fa": [1.5]},
                    "resident": {"cutaway": [500]},
                },
            }
        },
    }
    lines = maker["speed"](saved, maker["WORDS"]["README.md"]).splitlines()
    assert lines[2] == "| m | decode, 64 tokens | 70.0 tok/s | 35.0 tok/s | 2.00 x | – |"
    assert lines[3] == "| m | process start to first token | 0.50 s | 1.25 s | 2.50 x | – |"
    assert lines[4] == "| m | resident memory, context 4,096 filled | 500 MiB | – | – | – |"
    assert "30.0 GB/s" in lines[-1]
    assert "cutaway 0.1.0, llama-cpp-python b1. " in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("code", cases("python"))
def test_python_blocks_run(code):
    need_models()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", READMES)
def test_the_first_command_answers_as_printed(page):
    need_models()
    line = blocks(page, "console")[0].strip().partition(" && ")[2]
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer, stats = blocks(page, "text")[:2]
    if f"{isas()[0]} kernels" in stats:  # the same bits on the same instruction set
        assert done.stdout.strip() == answer.strip()
    assert "Transformer" in done.stdout
