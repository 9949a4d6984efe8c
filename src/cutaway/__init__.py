"""Cutaway: an LLM inference engine with its side cut open.

    from cutaway import LLM

    llm = LLM("qwen2.5-coder-0.5b")
    print(llm.generate("The capital of France is", max_tokens=8).text)

The names below are loaded when they are first used, so that `import cutaway` costs nothing. Read next: `llm.py`, then
`forward/decoder.py`; docs/reading.md has the whole path.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.errors import CutawayError
    from cutaway.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CutawayError", "__version__"]

_HOMES = {"LLM": "cutaway.llm", "CutawayError": "cutaway.errors"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cutaway' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
