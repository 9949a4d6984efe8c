"""The engines under comparison, as seen from a benchmark script: worker processes that answer in turn.

Holds how a worker is started and asked, how rounds are interleaved, and where models and text come from. Knows no
measure and no target: those are in `versus.py`, `quality.py` and `sweep.py`. The other end is `worker.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

__all__ = [
    "Contender",
    "EngineError",
    "Worker",
    "first_token_s",
    "in_turn",
    "model_path",
    "progress",
    "prompt_text",
    "shared_options",
    "start",
]

HERE = Path(__file__).resolve().parent
REPO = HERE.parent


class EngineError(RuntimeError):
    """A worker could not be started or could not do what was asked."""


class Worker:
    """A worker process. `ask` sends one command and waits for its answer."""

    def __init__(self, name: str, python: str, script: str, environment: dict[str, str], verbose: bool = False) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def ask(self, do: str, **params: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **params}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"{self.name}: its process has ended; --verbose shows why") from None
        line = process.stdout.readline()
        if not line:
            raise EngineError(
                f"{self.name}: its process ended during {do} (exit code {process.wait()}); --verbose shows why"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {do}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass
class Contender:
    """One engine at one setting: a worker, and the parameters every command to it carries."""

    label: str
    engine: str  # "cutaway", "llama.cpp" or "transformers"
    worker: Worker
    params: dict[str, Any] = field(default_factory=dict)

    def ask(self, do: str, **params: Any) -> dict[str, Any]:
        return self.worker.ask(do, **params, **self.params)


# -- starting engines ---------------------------------------------------------------------------------------------


def _environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment, with a Cutaway built in place beside this folder first on the path."""
    environment = {**os.environ, **extra}
    source = machine.source_tree()
    if source is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), environment.get("PYTHONPATH", "")]))
    return environment


def start(engine: str, args: argparse.Namespace) -> Worker:
    """A fresh worker of "cutaway", "llama.cpp" or "transformers"; it has loaded nothing yet."""
    python, script, environment = _command(engine, args)
    return Worker(engine, python, script, environment, args.verbose)


def _command(engine: str, args: argparse.Namespace) -> tuple[str, str, dict[str, str]]:
    """Which Python runs which script in which environment."""
    if engine == "cutaway":
        return sys.executable, "worker_cutaway.py", _environment({"CUTAWAY_ISA": args.isa} if args.isa else {})
    if engine == "llama.cpp":
        return args.llama_python, "worker_llama.py", _llama_environment(args)
    return sys.executable, "worker_transformers.py", dict(os.environ)


def _llama_environment(args: argparse.Namespace) -> dict[str, str]:
    environment = dict(os.environ)
    if args.llama_lib:
        environment["LLAMA_CPP_LIB_PATH"] = args.llama_lib
        earlier = environment.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [args.llama_lib, earlier]))
    return environment


def first_token_s(engine: str, args: argparse.Namespace, model: str, prompt: str, flash: bool) -> dict[str, Any]:
    """Start a fresh process and time it, from outside, until its first token is there.

    Gives back the process's own account of the parts plus `seconds`, the outside time.
    """
    python, script, environment = _command(engine, args)
    command = [python, str(HERE / script), "--first-token", model, prompt, "--threads", str(args.threads)]
    if flash:
        command.append("--flash")
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=None if args.verbose else subprocess.DEVNULL,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if not line:
        raise EngineError(f"{engine}: no first token; --verbose shows why")
    return {**json.loads(line), "seconds": seconds}


# -- rounds -------------------------------------------------------------------------------------------------------


def in_turn(
    contenders: Sequence[Contender],
    rounds: int,
    measure: Callable[[Contender, int], float],
    note: Callable[[str], None],
    first: int = 0,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure all contenders in every round, so that whatever the machine does meets them alike.

    `measure` gets a contender and the number of the round, counted from `first`: rounds that must not see the same
    prompt have different numbers. Each round starts with another contender. One that fails is left out from then on.
    Gives back (samples by label, reason of failure by label).
    """
    samples: dict[str, list[float]] = {one.label: [] for one in contenders}
    failures: dict[str, str] = {}
    for number in range(first, first + rounds):
        shift = number % max(1, len(contenders))
        for one in [*contenders[shift:], *contenders[:shift]]:
            if one.label in failures:
                continue
            note(f"round {number - first + 1}/{rounds}: {one.label}")
            try:
                samples[one.label].append(measure(one, number))
            except EngineError as error:
                failures[one.label] = str(error)
    return samples, failures


def progress(text: str) -> None:
    """One line on standard error that the next one replaces (nothing where that is not a terminal)."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K" + text[:100])
        sys.stderr.flush()


# -- models, text, options ----------------------------------------------------------------------------------------


def model_path(name: str) -> str:
    """The file of a catalogue name, or the path itself."""
    if Path(name).exists():
        return name
    home = os.environ.get("CUTAWAY_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cutaway"
    path = (Path(home) if home else cache) / "models" / f"{name}.gguf"
    if not path.exists():
        raise SystemExit(f"{name} is not here: `cutaway pull {name}` brings it (looked for {path})")
    return str(path)


def prompt_text(path: str | None, at_least: int = 60_000) -> tuple[str, str]:
    """Real text and the name of where it came from: `path`, else a wikitext beside the repository, else our docs."""
    if path:
        return Path(path).read_text(encoding="utf-8"), path
    shared = REPO.parent / "shared" / "data" / "wikitext2-test.txt"
    if shared.exists():
        return shared.read_text(encoding="utf-8"), shared.name
    pages = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md")), *sorted(HERE.glob("*.py"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    if not text:
        raise SystemExit("no text found: give one with --text FILE")
    while len(text) < at_least:
        text += "\n" + text
    return text, "the documentation of this repository"


def shared_options(parser: argparse.ArgumentParser) -> None:
    """Options every script of this folder takes."""
    parser.add_argument("--threads", type=int, default=machine.physical_cores(), help="default: physical cores")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that can import llama_cpp")
    parser.add_argument("--llama-lib", help="folder of another libllama.so for llama-cpp-python to load")
    parser.add_argument("--isa", help="instruction set for Cutaway's kernels (CUTAWAY_ISA)")
    parser.add_argument("--text", help="file of real text that prompts are cut from")
    parser.add_argument("--output", metavar="FILE", help="save everything as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
