"""`cutaway sample`: how each token is chosen. Read next: `report.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.faults import usage
from cutaway.cli.options import ModelOptions, SamplingOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt
from cutaway.cli.screen import progress

if TYPE_CHECKING:
    from cutaway.render.document import Document

__all__ = ["sample"]

TOKENS = 24
CONTINUATION = 48


@command
def sample(
    options: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    steps: Annotated[int | None, typer.Option("--steps", min=0, help="Show the chain of so many tokens only.")] = None,
    temperatures: Annotated[
        str | None, typer.Option("--temperatures", help="Compare these, such as 0.3,0.7,1.0,1.5.")
    ] = None,
    continuations: Annotated[int, typer.Option("--continuations", min=1, help="Texts at each temperature.")] = 5,
    dialects: Annotated[
        str | None,
        typer.Option("--dialects", help="The same settings by other engines' rules: `all`, or hf,vllm,llama.cpp,mlx."),
    ] = None,
) -> None:
    """How each token was chosen: candidates through every stage of the chain, the draw, greedy beside sampled."""
    with usage():
        chosen = None if temperatures is None else _numbers(temperatures)
        rules = None if dialects is None else _dialect_names(dialects)
    text = read_prompt(prompt)
    from cutaway.cli.answer import sampling_params
    from cutaway.cli.loading import open_model
    from cutaway.experiments.generating import request_ids

    llm = open_model(options)
    settings = sampling.resolve(llm.checkpoint.generation)
    params = sampling_params(settings)
    ids = request_ids(llm, text, raw)
    say = progress()
    say("sampling")
    document: Document
    result: Any
    if chosen is not None:
        document, result = _temperatures(llm, ids, params, chosen, continuations, output)
    elif rules is not None:
        document, result = _dialects(llm, ids, params, rules, output)
    else:
        document, result = _steps(llm, ids, params, settings, steps, output)
    say("")
    deliver(document, result, output)


def _numbers(values: str) -> list[float]:
    """The temperatures, judged as a request would judge each, before a model is loaded for them."""
    from cutaway.engine.sampling import SamplingParams

    try:
        chosen = [float(value) for value in values.split(",") if value.strip()]
    except ValueError:
        chosen = []
    if not chosen:
        raise typer.BadParameter(f"--temperatures takes numbers and commas, such as 0.3,0.7,1.5, not {values!r}")
    for value in chosen:
        SamplingParams(temperature=value)
    return chosen


def _dialect_names(names: str) -> list[str]:
    from cutaway.engine.dialects import DIALECTS
    from cutaway.engine.sampling import SamplingParams

    chosen = list(DIALECTS) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise typer.BadParameter(f"--dialects takes `all` or names of {', '.join(DIALECTS)}, not {names!r}")
    for name in chosen:
        SamplingParams(dialect=name)
    return chosen


def _temperatures(
    llm: Any, ids: Any, params: Any, chosen: list[float], count: int, output: OutputOptions
) -> tuple[Any, Any]:
    from dataclasses import replace

    from cutaway.experiments.sampler import temperatures
    from cutaway.render.views.sampler import temperatures as view

    params = replace(params, max_tokens=params.max_tokens or CONTINUATION)
    result = temperatures(llm, ids, chosen, params, count)
    return view(result, output.language), result


def _dialects(llm: Any, ids: Any, params: Any, names: list[str], output: OutputOptions) -> tuple[Any, Any]:
    from cutaway.experiments.sampler import dialects
    from cutaway.render.views.sampler import dialects as view

    result = dialects(llm, ids, params, names)
    return view(result, output.language), result


def _steps(llm: Any, ids: Any, params: Any, settings: Any, steps: int | None, output: OutputOptions) -> tuple[Any, Any]:
    from dataclasses import replace

    from cutaway.experiments.sampler import Origin, sample
    from cutaway.render.views.sampler import sampled as view

    origins = {name: Origin(setting.value, setting.origin) for name, setting in settings.items()}
    if params.max_tokens is None:
        params = replace(params, max_tokens=TOKENS)
        origins["max_tokens"] = Origin(TOKENS, "default")
    result = sample(llm, ids, params, settings=origins)
    return view(result, output.language, steps), result
