"""The one reader of text that comes in: arguments, pipes, files and the lines of a chat.

UTF-8, whatever the locale says. A leading U+FEFF (a signature that editors write) is dropped, and so is the last line
end, \\n or \\r\\n; those inside stay. A wrong byte is an error that names its offset. Read next: `run.py`.
"""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path

from cutaway.cli.screen import note
from cutaway.errors import RequestError

__all__ = ["decoded", "path_of", "piped", "read_prompt", "read_text"]

SILENCE_S = 1.0  # a pipe that says nothing for so long is worth a word


def decoded(data: bytes, what: str) -> str:
    """Bytes as text by the rule of this file. Raises RequestError for a wrong byte; `what` begins the sentence."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"a wrong byte at offset {error.start}"
        raise RequestError(f"{what} is not UTF-8", found=found, param="text") from None
    text = text.removeprefix("\ufeff")
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def read_prompt(argument: str | None, what: str = "prompt") -> str:
    """The text to work on: the argument, or stdin where the argument is `-` or missing and stdin is not a terminal.

    Raises: RequestError if the text is not UTF-8, and BadParameter (usage) if there is none.
    """
    import typer

    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter(f"no {what}: give it as an argument, or pipe it in")
    text = decoded(_stdin(), f"the {what}")
    if argument is None and not text:
        raise typer.BadParameter(f"no {what}: give it as an argument, or pipe it in")
    return text


def piped() -> str:
    """What a pipe or a file brings on stdin beside an argument; nothing where stdin is anything else, or empty."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or a test's own stream
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    if stat.S_ISFIFO(mode) and not select.select([sys.stdin], [], [], SILENCE_S)[0]:
        note("cutaway: waiting for the text of the pipe on standard input (none: < /dev/null)")
    return decoded(_stdin(), "standard input")


def read_text(path: Path) -> str:
    """A text file, or stdin for `-`.

    Raises: RequestError if it cannot be read, or is not UTF-8.
    """
    if str(path) == "-":
        return read_prompt("-", "text")
    try:
        return decoded(path_of(path).read_bytes(), str(path))
    except OSError as error:
        raise RequestError(f"cannot read {path}", found=error.strerror, param="text") from None


def path_of(path: str | Path) -> Path:
    """A path with `~` in its place. A user who does not exist leaves it as it is: then there is no such file."""
    return Path(os.path.expanduser(path))


def _stdin() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise RequestError("cannot read standard input", found=error.strerror) from None
