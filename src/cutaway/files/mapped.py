"""A file as a read-only memory map, opened with the checks that do not depend on its format.

Knows bytes and their most common disguises, no model format. Read next: `gguf.py`, `safetensors.py`.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from cutaway.errors import FormatError, NotFoundError

__all__ = ["MappedFile"]


class MappedFile:
    """The bytes of a file: `bytes` for `struct`, `array` (uint8, read-only) for views of weights."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        if not path.is_file():
            raise NotFoundError(f"{path} is not a file", expected=kind)
        with path.open("rb") as file:
            self.size = file.seek(0, 2)
            if self.size == 0:
                raise FormatError(f"{path} is empty", expected=kind)
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array = np.frombuffer(self.bytes, np.uint8)

    def error(self, what: str, found: object = None, expected: object = None) -> FormatError:
        """The error to raise: names the file first."""
        return FormatError(f"{self.path}: {what}", found=found, expected=expected)

    def not_this_kind(self, what: str) -> FormatError:
        """The error for a file whose first bytes are wrong: says what it looks like, where that is known."""
        head = self.bytes[:512].lstrip()
        low = head.lower()
        if head.startswith(b"version https://git-lfs"):
            looks, hint = "looks like a Git LFS pointer", "fetch the file itself with `git lfs pull`"
        elif low.startswith((b"<!doctype html", b"<html")):
            looks, hint = "looks like an HTML page", "the download gave an error page: fetch the file again"
        elif head.startswith(b"GGUF"):
            looks, hint = "looks like a GGUF file", "give it a name that ends in .gguf"
        elif head.startswith(b"PK\x03\x04"):
            looks, hint = "looks like a zip archive or a PyTorch pickle, which is never opened", "convert it first"
        elif head[8:9] == b"{":
            looks, hint = "looks like a safetensors file", "give it a name that ends in .safetensors"
        else:
            looks, hint = what, "the download may have been cut or changed"
        return FormatError(f"{self.path} is not {self.kind}: it {looks}", hint=hint)
