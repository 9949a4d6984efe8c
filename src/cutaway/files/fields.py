"""Typed reading of the settings in a model's files, with errors that name the setting.

The same reader serves a config.json and the metadata of a GGUF file. Read next: `weights.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutaway.errors import FormatError, NotFoundError, UnsupportedError

__all__ = ["Fields", "parse_json", "read_json", "read_text", "shown"]

MAX_TEXT_BYTES = 64 << 20
MAX_JSON_BYTES = 16 << 20  # the longest index of shards in use is some 10 MB
MAX_JSON_ITEMS = 1 << 19  # objects, lists and what is between commas: what a text costs as Python objects
MAX_JSON_DEPTH = 32


class Fields:
    """Settings of one file. A missing value and a null are the same; without a default they are errors."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.error(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None, least: float = 1e-30) -> float:
        """A number from `least` up to 1e12: no rule of an architecture needs more, and float32 can divide by it."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not least <= value < 1e12:
            raise self.error(key, value, f"a number between {least:g} and 1e12")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a text")
        return value

    def nested(self, key: str) -> Fields:
        """The settings inside an object; an object that is missing is empty."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return Fields(self.path, value)

    def refuse(self, key: str, harmless: tuple[Any, ...] = (), why: str = "is not implemented") -> None:
        """Refuse a setting whose value is not one of those that change nothing (null never does)."""
        value = self.get(key)
        if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
            raise UnsupportedError(f"{self.path}: {self.prefix}{key} {why}", found=shown(value))

    def error(self, key: str, found: object, expected: str) -> FormatError:
        return FormatError(f"{self.path}: {self.prefix}{key}", found=shown(found), expected=expected)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise FormatError(f"{self.path}: {self.prefix}{key} is missing")
        return value


def shown(value: object) -> str:
    """A value from a file as an error line shows it: short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_text(path: Path) -> str:
    """A small UTF-8 file. Raises FormatError for anything else, a pipe or a device included."""
    if not path.is_file():
        raise NotFoundError(f"{path} is not a file")
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise FormatError(f"{path} is too large", found=f"{size} bytes", expected=f"at most {MAX_TEXT_BYTES}")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FormatError for anything else."""
    return parse_json(path, read_text(path))


def parse_json(path: Path, text: str | bytes) -> dict[str, Any]:
    """The object in a JSON text that came from `path`, judged before it is made.

    Raises: FormatError: no JSON, no object, a key twice in an object, or a text that would cost much more than it is.
    """
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"{path}: JSON", found=f"{len(text)} bytes", expected=f"at most {MAX_JSON_BYTES}")
    data = text.encode() if isinstance(text, str) else text
    items = sum(data.count(mark) for mark in b"{[,")
    if items > MAX_JSON_ITEMS:
        raise FormatError(f"{path}: JSON", found=f"{items} objects and items", expected=f"at most {MAX_JSON_ITEMS}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object)
    except _TwiceError as error:
        raise FormatError(f"{path}: JSON", found=f"the key {shown(str(error))} twice in one object") from None
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise FormatError(f"{path}: not readable as JSON", found=str(error) or type(error).__name__) from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: JSON", found=type(value).__name__, expected="an object")
    level: list[Any] = [value]
    depth = 0
    while level:
        if (depth := depth + 1) > MAX_JSON_DEPTH:
            raise FormatError(f"{path}: JSON nests too deeply", expected=f"at most {MAX_JSON_DEPTH} levels")
        inner = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return value


class _TwiceError(Exception):
    """A key that stands twice in an object: readers differ in which value they take."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _TwiceError(key)
            seen.add(key)
    return made
