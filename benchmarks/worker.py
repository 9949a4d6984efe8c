"""The side of a worker that is the same for every engine: commands in, answers out, one JSON object a line.

An engine under measurement lives in its own process: it loads its model once and then answers commands from standard
input, so that a script can ask several engines in turn within one run. Anything a library prints goes to standard
error. Needs the standard library and NumPy only, since it also runs under another engine's Python.
Read next: `worker_cutaway.py`.

A command is {"do": name, ...parameters}; the answer is what the function of that name gives back, or {"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["first_token", "memory", "serve"]

Answer = dict[str, Any]


def memory() -> Answer:
    """Resident memory of this process from /proc/self/status.

    Units: bytes. `resident` now, `peak` the most it ever was, `anonymous` and `file` its two main parts (`file` are
    pages of mapped files, which the system can drop and read again).
    """
    keys = {"VmRSS": "resident", "VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "file"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in keys:
            found[keys[key]] = int(value.split()[0]) * 1024
    return found


def _private_stdout() -> Callable[[Answer], None]:
    """Keep the real standard output for answers and point file descriptor 1 at standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: Answer) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return answer


def serve(commands: dict[str, Callable[..., Answer]]) -> None:
    """Answer commands until standard input ends or {"do": "quit"} comes."""
    answer = _private_stdout()
    commands = {"memory": memory, **commands}
    for line in sys.stdin:
        message = json.loads(line)
        name = message.pop("do")
        if name == "quit":
            break
        try:
            answer(commands[name](**message))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def first_token(run: Callable[[], Answer], started: float) -> None:
    """Run once to the first token and say so at once; whoever started this process holds the watch.

    `started`: `time.perf_counter()` before the engine was imported. `run` gives back the parts it knows, in seconds.
    """
    answer = _private_stdout()
    parts = run()
    answer({"inside_s": time.perf_counter() - started, **parts})
    os._exit(0)  # tearing down is not part of the question
