"""What a verb shows: results on stdout, everything else on stderr, each through the one filter.

Text that a file, a model or a conversation wrote must not steer a terminal. Where it meets one, control characters
(C0 and C1; newlines and tabs stay), bidirectional and other format characters, and the line and paragraph separators
are shown as signs, never obeyed: on stderr always, for it is for people wherever it goes; on stdout when that is a
terminal, so that a pipe gets the answer as it is. JSON is ASCII anyway. Read next: `streams.py`, then `run.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.render.document import Document

__all__ = ["colour", "note", "progress", "show", "write"]


def write(text: str) -> None:
    """Write text to stdout at once. A pipe gets it as it is, a terminal without what could steer it."""
    if sys.stdout.isatty():
        from cutaway.render.plain import harmless

        text = harmless(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write one or more lines to stderr, without what could steer a terminal."""
    from cutaway.render.plain import harmless

    sys.stderr.write(harmless(text) + "\n")
    sys.stderr.flush()


def colour(stream: Any) -> bool:
    """Whether to use colour on a stream: a terminal, unless NO_COLOR is set."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(document: Document, data: Any, as_json: bool, to: str = "stdout") -> None:
    """Show a result: `data` as JSON, or the document as wide as the terminal (80 columns in a pipe)."""
    from cutaway.render import render

    stream = sys.stdout if to == "stdout" else sys.stderr
    if as_json:
        stream.write(render(document, "json", data=data))
    else:  # its strings were made harmless, the colours are its own
        width = shutil.get_terminal_size().columns if stream.isatty() else 80
        stream.write(render(document, "terminal", width=max(width, 40), colour=colour(stream)))
    stream.flush()


def progress() -> Callable[[str], None]:
    """A line on stderr that says what is being done, where that is a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        return lambda line: None
    from cutaway.render.plain import harmless

    def say(line: str) -> None:
        sys.stderr.write(f"\r\033[K{harmless(line)[:76]}" if line else "\r\033[K")
        sys.stderr.flush()

    return say
