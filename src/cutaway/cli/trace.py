"""`cutaway trace`: one forward pass with its side open. Read next: `diff.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.cli.options import ModelOptions, command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt
from cutaway.cli.screen import note, progress
from cutaway.cli.writing import check_target, replacing
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["trace"]


@command
def trace(
    options: ModelOptions,
    output: OutputOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the chat template; otherwise it is taken as it is.")
    ] = False,
    tap: Annotated[
        list[str] | None,
        typer.Option("--tap", metavar="PATTERN", help="Describe these tensors, such as 'layers.*.attn.q'. Repeatable."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write tapped tensors and attention to a .npz or .safetensors file.")
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option("--attention", metavar="LAYER[:HEAD]", help="Show the weights of a head, or a layer. Repeatable."),
    ] = None,
    last_rows: Annotated[
        int | None, typer.Option("--last-rows", min=1, help="Attention of the last so many tokens only.")
    ] = None,
    lens: Annotated[int, typer.Option("--lens", min=0, help="Logit lens for the last so many tokens; 0 is off.")] = 8,
    answer: Annotated[
        str | None, typer.Option("--answer", help="Ask the lens about this text's first token, not the model's own.")
    ] = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="A row for every operation of every layer: the names --tap takes.")
    ] = False,
) -> None:
    """One forward pass: every operation's shapes, bytes, work and time; residuals, logit lens, attention, tensors."""
    if save is not None:
        if save.suffix not in (".npz", ".safetensors"):
            raise typer.BadParameter(f"tensors are saved as .npz or .safetensors, not {save.name}", param_hint="--save")
        check_target(save)
    heads = [_head(one) for one in attention or ()]
    text = read_prompt(prompt)
    from cutaway.cli.loading import open_model
    from cutaway.experiments.trace import trace as traced
    from cutaway.render.views.trace import trace as view

    llm = open_model(options)
    ids = llm.chat_ids([{"role": "user", "content": text}]) if chat else llm.tokenize(text)
    say = progress()
    say("tracing")
    result = traced(
        llm,
        ids if chat else text,
        tap or (),
        lens_positions=lens or None,
        answer=_answer(llm, answer),
        attention=heads,
        attention_rows=range(max(0, len(ids) - last_rows), len(ids)) if last_rows else None,
    )
    say("")
    deliver(view(result, output.language, all_layers), result, output)
    if save is not None:
        with replacing(save) as path:
            result.save(path)
            size_bytes = path.stat().st_size
        note(f"wrote {save} ({size_bytes / 1024:,.0f} KiB)")


def _head(text: str) -> tuple[int, int | None]:
    layer, colon, head = text.partition(":")
    if not layer.isdecimal() or (colon and not head.isdecimal()) or len(text) > 12:
        raise typer.BadParameter(f"{text!r} is not LAYER or LAYER:HEAD, such as 3:5", param_hint="--attention")
    return int(layer), int(head) if colon else None


def _answer(llm: LLM, text: str | None) -> int | None:
    if text is None:
        return None
    ids = llm.tokenizer.encode(text)
    if not ids:
        raise RequestError("the answer is empty", param="answer")
    return ids[0]
