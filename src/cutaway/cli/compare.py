"""`cutaway compare`: two models or two conditions side by side. Read next: `score.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cutaway.cli.conditions import LOADING, SAMPLING, labels, open_sides, settings
from cutaway.cli.options import command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt, read_text
from cutaway.cli.screen import progress

__all__ = ["compare"]

ASKING: dict[str, type] = {"template": str, "system": str}


@command
def compare(
    output: OutputOptions,
    a: Annotated[str, typer.Argument(help="A model: a path, a catalogue name, or a hub id.")],
    b: Annotated[str | None, typer.Argument(help="Another one. Default: the same model.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; `-` or nothing reads stdin.")
    ] = None,
    set_a: Annotated[
        list[str] | None,
        typer.Option(
            "--a", metavar="NAME=VALUE", help="A setting of A: template=raw, system=..., temperature=0.7, ..."
        ),
    ] = None,
    set_b: Annotated[
        list[str] | None, typer.Option("--b", metavar="NAME=VALUE", help="A setting of B, such as kv_type=q8_0.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to answer with at most.")] = 64,
    text: Annotated[Path | None, typer.Option("--text", help="Also the perplexity of this file under both.")] = None,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens read at once for the perplexity.")] = 512,
) -> None:
    """Two models, or one under two conditions: their answers, then what each thinks of both answers, token by token.

    KL divergence, each other's probabilities and P(end of turn) at every step. A model with a chat template is asked
    through it unless template=raw.
    """
    known = LOADING | SAMPLING | ASKING
    given = settings(set_a or (), known, "--a"), settings(set_b or (), known, "--b")
    for option, side in zip(("--a", "--b"), given, strict=True):
        if side.get("template", "chat") not in ("chat", "raw"):
            raise typer.BadParameter(f"{option} template is chat or raw, not {side['template']!r}")
    asked = read_prompt(prompt)
    words = read_text(text) if text is not None else None
    from cutaway.experiments.compare import Condition
    from cutaway.experiments.compare import compare as compared
    from cutaway.render.views.compare import compare as view

    models = open_sides((a, b), (_part(given[0], LOADING), _part(given[1], LOADING)))
    names = labels((a, b), (set_a or (), set_b or ()))
    sides = [
        Condition(
            llm,
            name,
            chat=side.get("template", "chat" if llm.chat_template else "raw") == "chat",
            system=side.get("system"),
            sampling=_part(side, SAMPLING),
        )
        for llm, name, side in zip(models, names, given, strict=True)
    ]
    say = progress()
    say("comparing")
    result = compared(sides[0], sides[1], asked, max_tokens=max_tokens, text=words, window=window)
    say("")
    deliver(view(result, output.language), result, output)


def _part(given: dict[str, Any], known: dict[str, type]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in known}
