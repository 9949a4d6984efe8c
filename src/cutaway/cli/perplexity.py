"""`cutaway perplexity`: how well a model predicts a text of any length. Read next: `trace.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.options import ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_text
from cutaway.cli.screen import progress

__all__ = ["perplexity"]


@command
def perplexity(
    options: ModelOptions,
    output: OutputOptions,
    file: Annotated[Path, typer.Argument(help="A text file in UTF-8; `-` reads stdin.")],
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens read at once.")] = 512,
    stride: Annotated[
        int | None,
        typer.Option("--stride", min=1, help="Tokens between the starts of windows. Default: half the window."),
    ] = None,
    rule: Annotated[
        str, typer.Option("--rule", help="sliding, or llama.cpp for numbers that compare with llama-perplexity.")
    ] = "sliding",
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Stop after so many windows.")] = None,
) -> None:
    """Perplexity and bits per byte of a text file.

    sliding: windows overlap and each token but the first is judged once, by the first window that reaches it.
    llama.cpp: windows lie end to end and only the second half of each is judged.
    """
    if rule not in ("sliding", "llama.cpp"):
        raise typer.BadParameter(f"--rule is sliding or llama.cpp, not {rule!r}")
    text = read_text(file)
    from cutaway.cli.loading import open_model
    from cutaway.experiments.score import perplexity as measured
    from cutaway.render.views.score import perplexity as view

    llm = open_model(options)
    say = progress()

    def tell(done: int, windows: int, so_far: float) -> None:
        say(f"window {done} of {windows}, perplexity {so_far:.4f}")

    result = measured(llm, text, window, stride, rule=rule, chunks=chunks, progress=tell)  # type: ignore[arg-type]
    say("")
    deliver(view(result, output.language), result, output)
