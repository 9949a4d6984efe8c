"""Results as JSON: dataclasses, NumPy arrays and scalars, paths, enums. Not-a-number becomes null.

The text is plain ASCII, so no reader of any encoding trips over it. Read next: `html.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["plain", "script_json", "to_json"]


def plain(value: Any) -> Any:
    """`value` as dicts, lists, strings and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Set):
        return [plain(item) for item in sorted(value, key=repr)]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def to_json(value: Any, indent: int | None = 2) -> str:
    """A result as JSON text, ending in a newline."""
    return json.dumps(plain(value), indent=indent, allow_nan=False) + "\n"


def script_json(value: Any) -> str:
    """JSON that can stand inside an HTML script element: `<`, `>` and `&` are escaped, and all that is not ASCII."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
