"""The tree of errors a user can meet.

Every error says what is wrong, what was found, what was expected, and how to go on:

    CutawayError
    ├── LoadError            a file or folder is not a model we can use
    │   ├── NotFoundError    the name leads to no file
    │   ├── FormatError      the file is damaged, hostile, or not what its name says
    │   └── UnsupportedError the file is sound, and asks for something that is not implemented
    ├── RequestError         a request cannot be accepted (the server answers 400)
    │   ├── ContextLengthError  prompt longer than the context
    │   └── TemplateError       the chat template refused, or is broken
    └── KernelError          a kernel was called with arguments it cannot compute

This room knows nothing of any other. Read next: `config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ContextLengthError",
    "CutawayError",
    "FormatError",
    "KernelError",
    "LoadError",
    "NotFoundError",
    "RequestError",
    "TemplateError",
    "UnsupportedError",
    "reading",
]


class CutawayError(Exception):
    """A known fault. `str(error)` is one line: `what: found X, expected Y (hint)`.

    `param` names the field of a request that is at fault, where there is one.
    """

    def __init__(
        self,
        what: str,
        *,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
        param: str | None = None,
    ) -> None:
        self.what, self.found, self.expected, self.hint, self.param = what, found, expected, hint, param
        parts = []
        if found is not None:
            parts.append(f"found {found}")
        if expected is not None:
            parts.append(f"expected {expected}")
        line = what + (": " + ", ".join(parts) if parts else "")
        if hint:
            line += f" (hint: {hint})"
        super().__init__(" ".join(line.split()))


class LoadError(CutawayError):
    """A file or folder is not a model we can use."""


class NotFoundError(LoadError):
    """The name leads to no file."""


class FormatError(LoadError):
    """The file is damaged, hostile, or not what its name says."""


class UnsupportedError(LoadError):
    """The file is sound, and asks for something that is not implemented."""


class RequestError(CutawayError, ValueError):
    """A request cannot be accepted."""


class ContextLengthError(RequestError):
    """The prompt does not fit the context."""


class TemplateError(RequestError):
    """The chat template refused the messages, or is broken."""


class KernelError(CutawayError):
    """A kernel was called with arguments it cannot compute."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """While `what` is read: the system's refusals (no permission, a bad disk, no memory) become a LoadError."""
    try:
        yield
    except OSError as error:
        raise LoadError(f"{what} could not be read", found=error.strerror or str(error)) from None
    except MemoryError:
        raise LoadError(f"{what} could not be read", found="not enough memory") from None
