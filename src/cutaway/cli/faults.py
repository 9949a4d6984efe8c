"""What goes wrong, told in one line on stderr, and the exit status it has.

    1    a known error: a file, a model, a request that it cannot take, memory, a result that cannot be written
    2    wrong usage, found before a file is opened
    130  stopped by Ctrl-C
    141  the reader of stdout has left (`streams.py`), without a word

Anything else is a fault of the program and keeps its traceback. Read next: `streams.py`.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from cutaway.cli.screen import note
from cutaway.errors import CutawayError, RequestError

__all__ = ["STOPPED", "faults", "told", "usage"]

STOPPED = 130  # 128 + SIGINT


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """Turn a known error, want of memory and Ctrl-C into one line and an exit."""
    try:
        yield
    except CutawayError as error:
        _end(str(error), 1)
    except MemoryError as error:
        _end(_memory(str(error)), 1)
    except KeyboardInterrupt:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again while we end: nothing more to stop
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")  # a line of progress, or the ^C that the terminal shows
        _end("stopped", STOPPED, "cutaway: ")
    except OSError as error:
        if error.errno == errno.ENOMEM:
            _end(_memory(""), 1)
        place = f"{error.filename}: " if error.filename is not None else ""
        _end(f"{place}{error.strerror or error}", 1)


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """What is refused in this block was wrong on the command line: status 2, not 1."""
    try:
        yield
    except RequestError as error:
        import typer

        raise typer.BadParameter(str(error)) from None


def told(line: str, prefix: str = "cutaway: error: ") -> None:
    """One line on stderr, whatever the text holds."""
    note(prefix + " ".join(line.split()))


def _end(line: str, status: int, prefix: str = "cutaway: error: ") -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    told(line, prefix)
    raise SystemExit(status) from None


def _memory(wanted: str) -> str:
    found = f": {wanted}" if wanted and "bad_alloc" not in wanted else ""
    return f"not enough memory{found} (hint: --max-context, or a smaller model, takes less)"
