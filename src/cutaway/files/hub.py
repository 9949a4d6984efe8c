"""A Hugging Face hub id to files: the cache on this machine first, then the hub through `huggingface_hub`.

An id is `org/name` (a folder of safetensors) or `org/name/file.gguf` (one file of a repository). The cache is read
here, without the library, so a model that is there needs neither network nor extra. Read next: `store.py`.

Source: the layout of the Hugging Face cache (models--ORG--NAME/refs, snapshots).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cutaway.errors import LoadError, NotFoundError
from cutaway.files.safetensors import find_safetensors

__all__ = ["fetch_from_hub", "find_in_cache", "is_hub_id"]

_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:/(?P<file>[\w./ +-]+\.gguf))?")
_PATTERNS = ["config.json", "generation_config.json", "tokenizer*.json", "*.jinja", "model*.safetensors",
             "model.safetensors.index.json"]  # fmt: skip


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id. `folder/model.gguf` has not: it is a path, if maybe to no file."""
    match = _ID.fullmatch(name)
    return match is not None and ".." not in name and not match["repo"].endswith((".gguf", ".safetensors"))


def find_in_cache(name: str) -> Path | None:
    """The folder (or GGUF file) of a hub id in the cache, if it is there and whole. Never uses the network."""
    repo, file = _split(name)
    repository = _cache_folder() / f"models--{repo.replace('/', '--')}"
    snapshots = repository / "snapshots"
    main = repository / "refs" / "main"
    if main.is_file():
        commits = [main.read_text("utf-8", "replace").strip()]
    else:
        commits = sorted(path.name for path in snapshots.glob("*"))[:1]
    for commit in commits:
        folder = snapshots / commit
        if not re.fullmatch(r"\w+", commit):
            continue
        if file and (folder / file).is_file():
            return folder / file
        if not file and _is_whole(folder):
            return folder
    return None


def fetch_from_hub(name: str) -> Path:
    """Download a hub id into the cache.

    Raises: NotFoundError: HF_HUB_OFFLINE is set, `huggingface_hub` is not installed, or the hub refused (why is said).
    """
    repo, file = _split(name)
    if any(os.environ.get(key, "").upper() in ("1", "ON", "YES", "TRUE") for key in _OFFLINE):
        raise NotFoundError(
            f"{name} is not in the Hugging Face cache, and HF_HUB_OFFLINE is set", found=_cache_folder()
        )
    try:
        import huggingface_hub
    except ImportError:
        hint = "pip install 'cutaway[hub]' to download from the hub"
        raise NotFoundError(f"{name} is not in the Hugging Face cache", found=_cache_folder(), hint=hint) from None
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repo, file, cache_dir=_cache_folder()))
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=_PATTERNS, cache_dir=_cache_folder()))
    except Exception as error:  # the library raises its own, the HTTP client's and the system's errors
        found = f"{type(error).__name__}: {error}"
        raise NotFoundError(f"{name} could not be fetched from the Hugging Face hub", found=found[:300]) from None


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def _split(name: str) -> tuple[str, str | None]:
    match = _ID.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["file"]


def _cache_folder() -> Path:
    environ = os.environ
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or Path(cache, "huggingface")).expanduser() / "hub"


def _is_whole(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    try:
        find_safetensors(folder)
    except NotFoundError:
        return False
    except LoadError:
        return True  # whoever opens it says what is wrong with it; fetching it again would not help
    return True
