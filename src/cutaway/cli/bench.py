"""`cutaway bench`: llama-bench's tests, flags and fields. Read next: `experiments/bench.py`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from cutaway.cli.faults import usage
from cutaway.cli.options import MAX_COUNT, MAX_THREADS, ModelOptions, command, whole
from cutaway.cli.screen import progress

__all__ = ["bench", "counts"]

FORMS = ("md", "csv", "json", "jsonl", "html")
MAX_TESTS = 1000  # numbers of one option


def counts(texts: list[str] | None, flag: str, low: int = 0, high: int = MAX_COUNT) -> tuple[int, ...]:
    """Whole numbers of options: lists `512,1024` and ranges `1-8` (by one), `1-8+2` (by two), `1-8*2` (doubling).

    Raises: BadParameter for anything else, for a number below `low` or above `high`, and for more than MAX_TESTS.
    """
    found: list[int] = []
    for part in ",".join(texts or []).split(","):
        part = part.strip()
        match = re.fullmatch(r"([0-9]{1,20})(?:-([0-9]{1,20})(?:([+*])([0-9]{1,9}))?)?", part)
        if match is None:
            if not part and not texts:
                continue
            raise typer.BadParameter(f"{flag} takes numbers, lists such as 512,1024 and ranges such as 1-8+1: {part!r}")
        first, last, by, step = int(match[1]), int(match[2] or match[1]), match[3] or "+", int(match[4] or 1)
        if (by == "+" and step < 1) or (by == "*" and (step < 2 or first < 1)) or last < first:
            raise typer.BadParameter(f"{flag}: the range {part} never arrives")
        whole(flag, str(first), low, high), whole(flag, str(last), low, high)
        while first <= last and len(found) <= MAX_TESTS:
            found.append(first)
            first = first + step if by == "+" else first * step
    if len(found) > MAX_TESTS:
        raise typer.BadParameter(f"{flag}: more than {MAX_TESTS} numbers")
    return tuple(found)


def _pairs(texts: list[str] | None) -> tuple[tuple[int, int], ...]:
    pairs = []
    for text in texts or []:
        match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", text.replace(" ", ""))
        if match is None:
            raise typer.BadParameter(f"-pg takes PROMPT,GENERATED such as 512,128: {text!r}")
        pairs.append((int(match[1]), int(match[2])))
    return tuple(pairs)


def _types(texts: list[str] | None, flag: str) -> tuple[str, ...]:
    from cutaway.engine.kv_cache import KV_TYPES

    types = tuple(part.strip() for part in ",".join(texts or ["f16"]).split(",") if part.strip())
    wrong = next((kind for kind in types if kind not in KV_TYPES), None)
    if wrong is not None or not types:
        raise typer.BadParameter(f"{flag} takes {', '.join(KV_TYPES)}: {wrong or 'nothing'!r}")
    return types


@command
def bench(
    model: Annotated[
        str | None, typer.Option("--model", "-m", envvar="CUTAWAY_MODEL", help="A path, a catalogue name, or a hub id.")
    ] = None,
    n_prompt: Annotated[list[str] | None, typer.Option("--n-prompt", "-p", help="Prompt tokens. Default: 512.")] = None,
    n_gen: Annotated[list[str] | None, typer.Option("--n-gen", "-n", help="Generated tokens. Default: 128.")] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("-pg", metavar="P,G", help="P prompt tokens, then G generated ones. Repeatable.")
    ] = None,
    n_depth: Annotated[
        list[str] | None, typer.Option("--n-depth", "-d", help="Tokens before the test. Default: 0.")
    ] = None,
    threads: Annotated[
        list[str] | None, typer.Option("--threads", "-t", help="Threads. Default: the physical cores allowed.")
    ] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Times each test is run.")] = 5,
    batch: Annotated[
        list[str] | None, typer.Option("--batch-size", "-b", help="Tokens handed over at once. Default: 2048.")
    ] = None,
    ubatch: Annotated[
        list[str] | None,
        typer.Option("--ubatch-size", "-ub", "--chunk", help="Prompt tokens of one step at most. Default: 512."),
    ] = None,
    k_types: Annotated[
        list[str] | None, typer.Option("--cache-type-k", "-ctk", help="Types of the keys. Default: f16.")
    ] = None,
    v_types: Annotated[
        list[str] | None, typer.Option("--cache-type-v", "-ctv", help="Types of the values. Default: f16.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option("--activations", help="What meets quantised weights: int8 or f32.")
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            "--head",
            min=1,
            help="Compute only the K largest logits, as greedy (1) and top-k requests do. Default: all.",
        ),
    ] = None,
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="Do not run each test once before.")] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="md, csv, json, jsonl or html. Default: a table for people.")
    ] = None,
) -> None:
    """Measure speed with llama-bench's tests, flags and fields.

    Numbers may be lists (512,1024) and ranges (1-8+1, 1-8*2). The forward pass alone is timed: tokenising and sampling
    are told apart from it.
    """
    if output is not None and output not in FORMS:
        raise typer.BadParameter(f"-o is one of {', '.join(FORMS)}: {output!r}")
    from cutaway.cli.loading import open_model
    from cutaway.cli.screen import show, write
    from cutaway.experiments.bench import BenchSettings
    from cutaway.experiments.bench import bench as measured
    from cutaway.render import render
    from cutaway.render.views import bench as views

    settings = BenchSettings(
        n_prompt=counts(n_prompt, "-p") if n_prompt else (512,),
        n_gen=counts(n_gen, "-n") if n_gen else (128,),
        pairs=_pairs(pairs),
        n_depth=counts(n_depth, "-d") or (0,),
        threads=counts(threads, "-t", 1, MAX_THREADS) or (None,),
        batch=counts(batch, "-b", 1) or (2048,),
        ubatch=counts(ubatch, "-ub", 1) or (512,),
        k_types=_types(k_types, "-ctk"),
        v_types=_types(v_types, "-ctv"),
        repetitions=repetitions,
        warm_up=not no_warmup,
        head_top_k=head,
    )
    if not settings.context:
        raise typer.BadParameter("there is nothing to run: give a number of tokens above 0 for -p, -n or -pg")
    options = ModelOptions(
        model=model, threads=settings.threads[0], max_context=max(settings.context, 2), activations=activations
    )
    with usage():
        options.check()
    llm = open_model(options)
    say = progress()
    result = measured(llm, settings, progress=say)
    say("")
    document = views.bench(result, compact=output is None)
    if output is None:
        show(document, result, False)
    elif output == "csv":
        write(views.csv(result))
    elif output == "jsonl":
        write(views.jsonl(result))
    else:
        write(render(document, output, data=list(result.rows)))
