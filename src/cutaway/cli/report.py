"""`cutaway report`: the whole article for your model and machine, as one page. Read next: `experiments/report.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cutaway.cli.options import ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt
from cutaway.cli.screen import progress

__all__ = ["report"]


@command
def report(
    options: ModelOptions,
    output: OutputOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="Seconds to run without the KV cache before steps are sampled.")
    ] = 60.0,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each continuation.")] = 48,
    lengths: Annotated[
        str, typer.Option("--lengths", help="Numbers of tokens to generate with the KV cache on and off.")
    ] = "64,128,256,512",
    seed: Annotated[int, typer.Option("--seed", min=-(2**63), max=2**64 - 1, help="Seed of what is sampled.")] = 0,
) -> None:
    """Every experiment on one prompt, explained in English or Chinese.

    With `-o report.html` one page to read or to mail.
    """
    from cutaway.cli.kv import numbers

    chosen = numbers(lengths, "lengths")
    text = read_prompt(prompt)
    from cutaway.cli.loading import open_model
    from cutaway.experiments.report import Settings
    from cutaway.experiments.report import report as made
    from cutaway.render.views.report import report as view

    settings = Settings(tokens=tokens, budget_s=budget or None, seed=seed, lengths=chosen)
    llm = open_model(options)
    say = progress()
    result = made(llm, text, settings, model_argument=options.model, progress=say)
    say("")
    deliver(view(result, output.language), result, output)
