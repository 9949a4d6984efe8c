"""Where a result goes: the terminal, or JSON, Markdown, a page or a PNG, on stdout or in a file.

Read next: `kv.py`, a verb that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.screen import note, show, write
from cutaway.cli.writing import check_target, replacing
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.render.document import Document, Language

__all__ = ["OutputOptions", "deliver"]


def _output(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Output", **more)


@dataclass(frozen=True)
class OutputOptions:
    """In what form a result is given, where to, and in what language it explains itself."""

    json: Annotated[bool, _output("--json", help="JSON: every number of the result.")] = False
    md: Annotated[bool, _output("--md", help="Markdown.")] = False
    html: Annotated[bool, _output("--html", help="One self-contained HTML page.")] = False
    png: Annotated[bool, _output("--png", help="The plots as a PNG (needs matplotlib and -o).")] = False
    output: Annotated[
        Path | None, _output("--output", "-o", help="Write to this file; its suffix chooses the form.")
    ] = None
    lang: Annotated[str, _output("--lang", envvar="CUTAWAY_LANG", help="Language of explanations: en or zh.")] = "en"

    @property
    def language(self) -> Language:
        """Raises: RequestError for a language other than English and Chinese."""
        from cutaway.render.words import language_of

        return language_of(self.lang)

    @property
    def form(self) -> str | None:
        """The form asked for by flag or by the file's suffix; None: the terminal.

        Raises: RequestError for two forms at once, or a suffix that means none.
        """
        from cutaway.render import format_of

        flags = [name for name in ("json", "md", "html", "png") if getattr(self, name)]
        if len(flags) > 1:
            raise RequestError("more than one form asked for", found=" and ".join(f"--{f}" for f in flags))
        if flags:
            return flags[0]
        return format_of(self.output) if self.output is not None else None

    def check(self) -> None:
        """Find out before the work begins whether its result can be written.

        Raises: RequestError for a form or a language that will not do; CutawayError for a place.
        """
        from cutaway.render import check_format

        if self.form == "png" and self.output is None:
            raise RequestError("a PNG is written to a file", hint="-o FILE.png", param="output")
        if self.form is not None:
            check_format(self.form)
        _ = self.language
        if self.output is not None:
            check_target(self.output)


def deliver(document: Document, data: Any, options: OutputOptions) -> None:
    """Give a result in the form asked for; `data` is the typed result behind the document."""
    from cutaway.render import render, save

    form = options.form
    if options.output is not None:
        with replacing(options.output) as path:
            save(document, path, to=form, data=data)
            size_bytes = path.stat().st_size
        note(f"wrote {options.output} ({size_bytes / 1024:,.0f} KiB)")
    elif form is None:
        show(document, data, False)
    else:
        write(render(document, form, data=data))
