"""`cutaway kv`: what the KV cache takes, what it saves, what a smaller one costs. Read next: `sample.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.faults import usage
from cutaway.cli.options import ModelOptions, command, whole
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt, read_text
from cutaway.cli.screen import progress

__all__ = ["kv", "numbers"]

kv = typer.Typer(help="The KV cache: planned, switched off, shrunk.", no_args_is_help=True)

PROMPT = "Explain what a Transformer is."


def numbers(text: str, what: str, least: int = 2) -> tuple[int, ...]:
    """Whole numbers with commas between them, each at least `least`; anything else is wrong usage."""
    found = tuple(whole(f"--{what}", part.strip(), least) for part in text.split(",") if part.strip())
    if not found:
        raise typer.BadParameter("it takes whole numbers and commas, such as 64,128,256", param_hint=f"--{what}")
    return found


@kv.command("plan")
@command
def plan(
    output: OutputOptions,
    model: Annotated[str | None, typer.Argument(help="A path, a catalogue name, or a hub id.")] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", "-c", min=1, help="Tokens. Default: those the model was trained for."),
    ] = None,
    kv_type: Annotated[str, typer.Option("--kv-type", help="Type of keys and values: f32, f16 or q8_0.")] = "f16",
    k_type: Annotated[str | None, typer.Option("--k-type", help="Type of the keys alone.")] = None,
    v_type: Annotated[str | None, typer.Option("--v-type", help="Type of the values alone.")] = None,
) -> None:
    """Memory for a context, before anything is loaded.

    Weights, KV cache (the formula with this model's numbers), scratch, and how many tokens would fit.
    """
    with usage():
        ModelOptions(kv_type=kv_type, k_type=k_type, v_type=v_type).check()
    from cutaway.cli.loading import locate
    from cutaway.experiments.kv import plan as planned
    from cutaway.files import checkpoint
    from cutaway.render.views.kv import plan as view

    found = checkpoint.load(locate(model))
    result = planned(found.config, found.nbytes, context, k_type or kv_type, v_type or kv_type, model=found.name)
    deliver(view(result, output.language), result, output)


@kv.command("bench")
@command
def bench(
    options: ModelOptions,
    output: OutputOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` reads stdin.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    lengths: Annotated[str, typer.Option("--lengths", help="Numbers of tokens to generate.")] = "64,128,256,512",
    budget: Annotated[
        float,
        typer.Option("--budget", min=0, help="Seconds without the cache before steps are sampled; 0: all steps."),
    ] = 60.0,
) -> None:
    """The same greedy text with the KV cache on and off: time against length, work of a step, rates."""
    chosen = numbers(lengths, "lengths")
    text = PROMPT if prompt is None else read_prompt(prompt)
    from cutaway.cli.loading import open_model
    from cutaway.experiments.generating import request_ids
    from cutaway.experiments.kv_bench import bench as measured
    from cutaway.render.views.kv import bench as view

    llm = open_model(options)
    say = progress()
    result = measured(llm, request_ids(llm, text, raw), chosen, budget_s=budget or None, progress=say)
    say("")
    deliver(view(result, output.language), result, output)


@kv.command("quality")
@command
def quality(
    options: ModelOptions,
    output: OutputOptions,
    text: Annotated[Path | None, typer.Argument(help="A text file in UTF-8; `-` reads stdin.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Instead of a text: a prompt and the model's own greedy answer.")
    ] = None,
    types: Annotated[
        str | None, typer.Option("--types", help="K and V types, such as f16/f16,q8_0/f16. Default: all.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=2, help="Tokens of the text to look at.")] = 512,
) -> None:
    """What each type of keys and values costs on your text: bytes, rate, perplexity, KL divergence, layer errors."""
    with usage():
        pairs = _pairs(types)
    words = (read_prompt(None, "text") if text is None else read_text(text)) if prompt is None else ""
    from cutaway.cli.loading import open_model
    from cutaway.experiments.generating import request_ids
    from cutaway.experiments.kv_quality import own_text
    from cutaway.experiments.kv_quality import quality as measured
    from cutaway.render.views.kv import quality as view

    llm = open_model(options)
    say = progress()
    found = words if prompt is None else own_text(llm, request_ids(llm, prompt))
    result = measured(llm, found, pairs, limit=limit, progress=say)
    say("")
    deliver(view(result, output.language), result, output)


def _pairs(types: str | None) -> list[tuple[str, str]] | None:
    if types is None:
        return None
    from cutaway.engine.kv_cache import KV_TYPES
    from cutaway.errors import RequestError

    pairs = []
    for part in types.split(","):
        k_type, slash, v_type = part.strip().partition("/")
        pairs.append((k_type, v_type if slash else k_type))
        for one in pairs[-1]:
            if one not in KV_TYPES:
                raise RequestError(
                    "no such KV cache type", found=repr(one), expected=", ".join(KV_TYPES), param="types"
                )
    return pairs
