"""`cutaway tune`: settings that depend on the machine, tried out. Read next: `experiments/tune.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from cutaway.cli.options import MAX_THREADS, ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.screen import progress

__all__ = ["threads", "tune"]

tune = typer.Typer(help="Settings that depend on the machine, tried out.", no_args_is_help=True)


@tune.callback()
def group() -> None:
    """Settings that depend on the machine, tried out."""


@tune.command("threads")
@command
def threads(
    options: ModelOptions,
    output: OutputOptions,
    counts: Annotated[
        str | None,
        typer.Option("--try", help="Numbers of threads, such as 1,2,4 or 1-8. Default: 1 to the CPUs allowed."),
    ] = None,
    oversubscribe: Annotated[bool, typer.Option("--oversubscribe", help="Up to twice the CPUs allowed.")] = False,
    prompt: Annotated[int, typer.Option("--n-prompt", "-p", min=1, help="Tokens of the prompt.")] = 256,
    tokens: Annotated[int, typer.Option("--n-gen", "-n", min=1, help="Tokens computed one by one.")] = 32,
    rounds: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Rounds.")] = 3,
) -> None:
    """Prefill and decode rates of every number of threads, the best marked, the default explained."""
    from cutaway.cli.bench import counts as whole
    from cutaway.cli.loading import open_model
    from cutaway.experiments.tune import threads as measured
    from cutaway.render.views.tune import threads as view

    tried = whole([counts], "--try", 1, MAX_THREADS) if counts else None
    if options.max_context is None:
        options = replace(options, max_context=max(prompt + tokens, 2))
    llm = open_model(options)
    say = progress()
    result = measured(
        llm, tried, oversubscribe=oversubscribe, prompt=prompt, tokens=tokens, rounds=rounds, progress=say
    )
    say("")
    deliver(view(result, output.language), result, output)
