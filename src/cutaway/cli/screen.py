"""What a verb shows: results on stdout, everything else on stderr.

Text that a model or a file wrote is shown with its control characters made harmless, if a terminal would obey them.
Read next: `run.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.render.document import Document

__all__ = ["colour", "note", "read_prompt", "show", "write"]


def write(text: str) -> None:
    """Write text to stdout at once. A pipe gets it as it is, a terminal without what could steer it."""
    if sys.stdout.isatty():
        from cutaway.render.plain import harmless

        text = harmless(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def note(line: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(line + "\n")
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
    else:
        width = shutil.get_terminal_size().columns if stream.isatty() else 80
        stream.write(render(document, "terminal", width=max(width, 40), colour=colour(stream)))
    stream.flush()


def read_prompt(argument: str | None, what: str = "prompt") -> str:
    """The text to work on: the argument, or stdin where the argument is `-` or missing and stdin is not a terminal.

    Of stdin one final newline is dropped. Raises RequestError if the text is not UTF-8, and BadParameter (usage) if
    there is none.
    """
    if argument is not None and argument != "-":
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise RequestError(f"the {what} is not UTF-8", param=what) from None
        return argument
    if argument is None and sys.stdin.isatty():
        raise _nothing(what)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the {what} is not UTF-8", found=f"a wrong byte at offset {error.start}", param=what
        ) from None
    if argument is None and not text:
        raise _nothing(what)
    return text[:-1] if text.endswith("\n") else text


def _nothing(what: str) -> Exception:
    import typer

    return typer.BadParameter(f"no {what}: give it as an argument, or pipe it in")
