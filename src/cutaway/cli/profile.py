"""`cutaway profile`: where the time of a step goes, beside the memory roof. Read next: `experiments/profile.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from cutaway.cli.options import ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.screen import progress

__all__ = ["profile"]


@command
def profile(
    options: ModelOptions,
    output: OutputOptions,
    prompt: Annotated[int, typer.Option("--n-prompt", "-p", min=1, help="Tokens of the prefill step.")] = 512,
    depth: Annotated[int, typer.Option("--n-depth", "-d", min=0, help="Tokens before it.")] = 0,
    repeats: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, help="Prefill runs; decode takes four times as many.")
    ] = 5,
    head: Annotated[
        int, typer.Option("--head", min=0, help="The K largest logits: 1 as greedy requests, 0 for all of them.")
    ] = 1,
    every: Annotated[bool, typer.Option("--ops", help="A row for each operation of each layer besides.")] = False,
) -> None:
    """Time, bytes and rates of every operation, beside the bandwidth measured on this machine.

    One prefill step and the decode step after it; totals, and what part of the roof was reached.
    """
    from cutaway.cli.loading import open_model
    from cutaway.experiments.profile import profile as measured
    from cutaway.render.views.profile import profile as view

    if options.max_context is None:
        options = replace(options, max_context=max(depth + prompt + 1, 2))
    llm = open_model(options)
    say = progress()
    result = measured(llm, prompt=prompt, depth=depth, repeats=repeats, head_top_k=head or None, progress=say)
    say("")
    deliver(view(result, output.language, every or output.form == "html"), result, output)
