"""A model's name to its files: a path, a short name of the catalogue, or a Hugging Face hub id, in that order.

`CUTAWAY_HOME` (default: `cutaway` in the XDG cache folder) holds the fetched models. A path never touches the network,
and neither does a model that is already here. Read next: `catalogue.py`, `pull.py`, `hub.py`; then `checkpoint.py`,
which reads the files.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from cutaway.errors import NotFoundError
from cutaway.files import hub
from cutaway.files.catalogue import CATALOGUE, DEFAULT, CatalogueModel
from cutaway.files.pull import Progress, fetch, progress_bar

__all__ = ["CATALOGUE", "DEFAULT", "InstalledModel", "home", "installed", "pull", "resolve"]


@dataclass(frozen=True)
class InstalledModel:
    """A model in the store; `entry` is its place in the catalogue, where it has one."""

    name: str
    path: Path
    file_bytes: int
    entry: CatalogueModel | None


def home() -> Path:
    """The folder that holds everything Cutaway stores."""
    if os.environ.get("CUTAWAY_HOME"):
        return Path(os.path.expanduser(os.environ["CUTAWAY_HOME"]))  # as it is where ~NAME is no user's
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "cutaway"


def resolve(name: str | Path = DEFAULT, progress: Progress | None = None) -> Path:
    """The file or folder of a model; a catalogue or hub model that is not here yet is fetched.

    Raises: NotFoundError (no such model), LoadError (it could not be fetched).
    """
    name = str(name)
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):  # os.path: never raises, whatever the name
        return path
    if name and "/" not in name and os.path.isfile(_stored(name)):
        return _stored(name)
    if name in CATALOGUE:
        return pull(name, progress)
    if _is_path(name):
        raise NotFoundError(f"no model {name[:300]!r}: no such file or folder")
    if hub.is_hub_id(name):
        return hub.find_in_cache(name) or hub.fetch_from_hub(name)
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else None
    expected = f"a path, a hub id (org/name) or one of {', '.join(CATALOGUE)}"
    raise NotFoundError(f"no model {name[:100]!r}", expected=expected, hint=hint)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a catalogue model, unless it is here already. Without `progress`, a bar is shown on a terminal.

    Raises: NotFoundError (not in the catalogue), LoadError (it could not be fetched; what was, is kept).
    """
    model = CATALOGUE.get(name)
    if model is None:
        raise NotFoundError(f"{name} is not in the catalogue", expected=" or ".join(CATALOGUE))
    path = _stored(name)
    if path.is_file():
        return path
    if progress is not None:
        return fetch(model, path, progress)
    with progress_bar(name) as bar:
        return fetch(model, path, bar)


def installed() -> list[InstalledModel]:
    """The models in the store, by name."""
    files = sorted(_models().glob("*.gguf"))
    return [InstalledModel(f.stem, f, f.stat().st_size, CATALOGUE.get(f.stem)) for f in files if f.is_file()]


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: `./x`, `/x`, `~/x`, or a file of weights that is no hub id."""
    weights = name.endswith((".gguf", ".safetensors")) and not hub.is_hub_id(name)
    return name.startswith(("/", "./", "../", "~")) or weights


def _models() -> Path:
    return home() / "models"


def _stored(name: str) -> Path:
    return _models() / f"{name}.gguf"
