"""Typed reading of the settings in a model's files, with errors that name the setting.

The same reader serves a config.json and the metadata of a GGUF file. Read next: `weights.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cutaway.errors import FormatError, UnsupportedError

__all__ = ["Fields", "parse_json", "read_json", "read_text"]

MAX_TEXT_BYTES = 64 << 20


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

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 and below 1e12 (no rule of an architecture needs more)."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self.error(key, value, "a number between 0 and 1e12")
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
            raise UnsupportedError(f"{self.path}: {self.prefix}{key} {why}", found=_shown(value))

    def error(self, key: str, found: object, expected: str) -> FormatError:
        return FormatError(f"{self.path}: {self.prefix}{key}", found=_shown(found), expected=expected)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise FormatError(f"{self.path}: {self.prefix}{key} is missing")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_text(path: Path) -> str:
    """A small UTF-8 file. Raises FormatError for anything else."""
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
    """The object in a JSON text that came from `path`. Raises FormatError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise FormatError(f"{path}: not readable as JSON", found=str(error) or type(error).__name__) from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: JSON", found=type(value).__name__, expected="an object")
    return value
