"""Files that a verb writes: whether one can be written is known before the work, and only a whole one appears.

Read next: `output.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cutaway.cli.reading import path_of
from cutaway.errors import CutawayError, NotFoundError

__all__ = ["check_target", "replacing"]


def check_target(path: Path) -> None:
    """Raises: NotFoundError where the folder is missing, CutawayError where the file cannot be written."""
    path = path_of(path)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise NotFoundError("no such folder", found=str(folder))
    if path.is_dir():
        raise CutawayError(f"cannot write {path}", found="a folder", expected="the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CutawayError(f"cannot write {path}", found="no permission")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, with the same suffix. What is whole takes the place of `path`; what is not (an error, a full
    disk, Ctrl-C) leaves it as it was. A device or a pipe is written directly.

    Raises: CutawayError where the system refuses.
    """
    check_target(path)
    path = path_of(path)
    target = path.resolve()
    part = target.with_name(f".{target.stem[:100]}.{os.getpid()}.part{target.suffix}")
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        part = target
    try:
        yield part
        if part is not target:
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
    except OSError as error:
        raise CutawayError(f"cannot write {path}", found=error.strerror or str(error)) from None
    finally:
        if part is not target:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
