"""Standard streams that are closed, full, or left by their reader: one rule, whoever writes.

    stdout   what cannot be written (a full disk, a closed stream) is a known error: one line, status 1.
             A reader that has left (`cutaway ... | head`) ends the program quietly with status 141, as SIGPIPE would.
    stderr   what cannot be written is dropped: it is never the result.
    stdin    closed is the same as empty.

`prepare` puts these rules around `sys.stdout` and `sys.stderr` themselves, so that they hold for help, version and
library code too. Read next: `screen.py`, what is written; `reading.py`, what is read.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

from cutaway.errors import CutawayError

__all__ = ["READER_LEFT", "prepare"]

READER_LEFT = 141  # 128 + SIGPIPE: what a shell reports of any other program in that place


class Outgoing:
    """A text stream that tells a failed write by the rule of its kind. All else is the stream's own."""

    def __init__(self, stream: Any, result: bool) -> None:
        self._stream, self._result = stream, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._abandon()
        if not self._result:
            return
        if isinstance(error, BrokenPipeError):
            raise SystemExit(READER_LEFT) from None
        why = "a closed stream" if error.errno == errno.EBADF else (error.strerror or str(error)).lower()
        raise CutawayError("cannot write to standard output", found=why) from None

    def _abandon(self) -> None:
        """What is still in the buffers goes nowhere, or Python would try again when it exits, and complain."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def prepare() -> None:
    """Put the rules around the standard streams. Done once; what is wrapped already is left alone."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            stream = _reopened(number, "r" if number == 0 else "w")
            setattr(sys, name, stream)
        if number and not isinstance(stream, Outgoing):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? and does not crash
            setattr(sys, name, Outgoing(stream, result=number == 1))


def _reopened(number: int, mode: str) -> io.TextIOBase:
    """A stream in the place of one that was closed: nothing to read; nothing that takes a result; a sink for the rest.

    The number itself is taken, so that no file opened later can end up in it and be written to by accident.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fstat(number)
        number = nowhere  # another file has the number already, or it is just the one we got
    if number != nowhere:
        os.dup2(nowhere, number)
        os.close(nowhere)
    return open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]
