"""Which language a document explains itself in. Read next: `views/kv.py`."""

from __future__ import annotations

from collections.abc import Callable

from cutaway.errors import RequestError
from cutaway.render.document import Language

__all__ = ["chosen", "language_of"]


def language_of(name: str) -> Language:
    """The language a user named: en or zh, with or without a region.

    Raises: RequestError for another one.
    """
    short = name.lower().replace("_", "-").split("-")[0]
    if short == "zh":
        return "zh"
    if short == "en":
        return "en"
    raise RequestError("no such language", found=repr(name), expected="en or zh", param="lang")


def chosen(language: Language) -> Callable[[str, str], str]:
    """A function that takes the English and the Chinese wording and gives the one asked for."""
    return (lambda en, zh: zh) if language == "zh" else (lambda en, zh: en)
