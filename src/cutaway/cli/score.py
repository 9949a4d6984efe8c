"""`cutaway score`: log-probability and rank of each token of a text. Read next: `perplexity.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.options import ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt, read_text

__all__ = ["score"]


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
    if text is not None and file is not None:
        raise typer.BadParameter("give the text or --file, not both")
    words = read_text(file) if file is not None else read_prompt(text, "text")
    from cutaway.cli.loading import open_model
    from cutaway.experiments.score import score as scored
    from cutaway.render.views.score import score as view

    result = scored(open_model(options), words)
    deliver(view(result, output.language), result, output)
