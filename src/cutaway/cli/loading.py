"""From a model's name to its files and to a loaded LLM; says so when something must be downloaded first.

Read next: `answer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.options import ModelOptions
from cutaway.cli.screen import note
from cutaway.files import store

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["locate", "open_model"]


def locate(model: str | None) -> Path:
    """The file or folder of a model (None: the default model); downloads one that is not here yet, and says so."""
    name = model or store.DEFAULT
    path = Path(name).expanduser()
    if name in store.CATALOGUE and not path.exists() and name not in (here.name for here in store.installed()):
        from cutaway.render.numbers import size

        entry = store.CATALOGUE[name]
        note(f"downloading {entry.title} ({size(entry.download_bytes)}, {entry.licence}) to {store.home()}")
    return store.resolve(name)


def open_model(options: ModelOptions) -> LLM:
    """The LLM that the options ask for."""
    from cutaway.llm import LLM

    return LLM(locate(options.model), **options.arguments())
