"""`cutaway score`: log-probability and rank of each token of a text. Read next: `perplexity.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.options import ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.screen import read_prompt

__all__ = ["read_text", "score"]


@command
def score(
    options: ModelOptions,
    output: OutputOptions,
    text: Annotated[str | None, typer.Argument(help="The text; `-` or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the text from this file.")] = None,
) -> None:
    """How expected each token of a text was: log-probability, rank, and what the model would have said instead.

    The text is taken as it is, without a chat template.
    """
    output.check()
    if text is not None and file is not None:
        raise typer.BadParameter("give the text or --file, not both")
    words = read_text(file) if file is not None else read_prompt(text, "text")
    from cutaway.cli.loading import open_model
    from cutaway.experiments.score import score as scored
    from cutaway.render.views.score import score as view

    result = scored(open_model(options), words)
    deliver(view(result, output.language), result, output)


def read_text(path: Path) -> str:
    """A text file in UTF-8, or stdin for `-`.

    Raises: RequestError if it cannot be read, or is not UTF-8.
    """
    from cutaway.errors import RequestError

    if str(path) == "-":
        return read_prompt("-", "text")
    try:
        return path.expanduser().read_bytes().decode("utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}", found=error.strerror, param="text") from None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8", found=f"a wrong byte at offset {error.start}", param="text"
        ) from None
