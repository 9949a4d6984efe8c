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
    from cutaway.engine.sampling import SamplingParams
    from cutaway.errors import CutawayError
    from cutaway.llm import LLM, Stream
    from cutaway.results import Chunk, Result, Stats

__version__ = "0.1.0"
__all__ = ["LLM", "Chunk", "CutawayError", "Result", "SamplingParams", "Stats", "Stream", "__version__"]

_HOMES = {
    "Chunk": "cutaway.results",
    "CutawayError": "cutaway.errors",
    "LLM": "cutaway.llm",
    "Result": "cutaway.results",
    "SamplingParams": "cutaway.engine.sampling",
    "Stats": "cutaway.results",
    "Stream": "cutaway.llm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cutaway' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
