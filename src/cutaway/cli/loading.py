"""From a model's name to a loaded LLM, with the progress of a download on stderr.

Read next: `answer.py`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.options import ModelOptions
from cutaway.cli.screen import note

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Progress", "locate", "open_model"]


class Progress:
    """A download as one line that is rewritten: share, size, rate, time left. Silent where stderr is no terminal.

    Called with the bytes that are there and the bytes there will be (None if unknown).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._started: tuple[float, int] | None = None
        self._shown_s = 0.0

    def __call__(self, done_bytes: int, total_bytes: int | None) -> None:
        from cutaway.render.numbers import size

        now = time.monotonic()
        if self._started is None:
            self._started = now, done_bytes
            if not sys.stderr.isatty():
                of = f" ({size(total_bytes)})" if total_bytes else ""
                note(f"downloading {self.name}{of}")
        finished = total_bytes is not None and done_bytes >= total_bytes
        if not sys.stderr.isatty() or (now - self._shown_s < 0.1 and not finished):
            return
        self._shown_s = now
        started_s, first = self._started
        rate = (done_bytes - first) / max(now - started_s, 1e-3)
        line = f"{self.name}  {size(done_bytes)}"
        if total_bytes:
            filled = 24 * done_bytes // total_bytes
            bar = "=" * filled + " " * (24 - filled)
            left_s = (total_bytes - done_bytes) / rate if rate else 0
            line = f"{self.name} [{bar}] {done_bytes / total_bytes:4.0%} of {size(total_bytes)}  {left_s:.0f} s left"
        sys.stderr.write(f"\r{line}  {size(rate)}/s\x1b[K" + ("\n" if finished else ""))
        sys.stderr.flush()


def locate(model: str | None) -> Path:
    """The files of a model by name; downloads a catalogue model that is not here yet."""
    from cutaway.files import store

    name = model or store.DEFAULT
    return store.resolve(name, progress=Progress(name))


def open_model(options: ModelOptions) -> LLM:
    """The LLM that the options ask for. Downloads the model when it is not here yet, and says so."""
    from cutaway.llm import LLM

    return LLM(str(locate(options.model)), **options.arguments())
