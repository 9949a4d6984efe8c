"""Results as outputs: a view makes a `Document`, a backend shows it.

    document = views.kv.plan(result)
    save(document, "plan.html")            # or .md, .json, .png, .txt
    render(document, "terminal")

Read next: `document.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cutaway.errors import CutawayError, RequestError
from cutaway.render.document import Document

__all__ = ["FORMATS", "check_format", "format_of", "render", "save"]

FORMATS = {"html": ".html", "md": ".md", "json": ".json", "png": ".png", "terminal": ".txt"}


def format_of(path: str | Path) -> str:
    """The format a file name asks for by its suffix."""
    suffix = Path(path).suffix.lower()
    for name, own in FORMATS.items():
        if suffix == own or (suffix == ".htm" and name == "html"):
            return name
    raise RequestError(f"no output format for {Path(path).name}", expected=" ".join(FORMATS.values()), param="output")


def check_format(to: str) -> None:
    """Whether this installation can make the format `to`, found out before the work whose result it is for.

    Raises: CutawayError where a library is missing.
    """
    if to == "png" and find_spec("matplotlib") is None:
        raise CutawayError("a PNG needs matplotlib", hint="pip install 'cutaway[plot]'", param="output")


def render(document: Document, to: str = "terminal", *, data: Any = None, width: int = 80, colour: bool = False) -> str:
    """The document as text in the format `to`: html, md, json or terminal.

    `data` is the typed result behind the document: it is the whole of `json`, and `html` carries it inside.
    """
    if to == "html":
        from cutaway.render.html import page

        return page(document, data)
    if to == "md":
        from cutaway.render.markdown import markdown

        return markdown(document)
    if to == "json":
        from cutaway.render.json import to_json

        return to_json(document if data is None else data)
    if to == "terminal":
        from cutaway.render.terminal import terminal

        return terminal(document, width=width, colour=colour)
    raise RequestError("no such output format", found=repr(to), expected=", ".join(FORMATS), param="format")


def save(document: Document, path: str | Path, *, to: str | None = None, data: Any = None) -> None:
    """Write the document to `path`; the suffix chooses the format unless `to` does. A PNG holds its plots."""
    path, to = Path(path), to or format_of(path)
    if to == "png":
        from cutaway.render.png import png

        path.write_bytes(png(document))
        return
    path.write_text(render(document, to, data=data), encoding="utf-8", newline="\n")
