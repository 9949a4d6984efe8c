"""`cutaway diff`: two runs tap by tap, and the first one that departs. Read next: `compare.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.conditions import LOADING, labels, open_sides, settings
from cutaway.cli.options import command
from cutaway.cli.output import OutputOptions, deliver
from cutaway.cli.reading import read_prompt
from cutaway.cli.screen import note

if TYPE_CHECKING:
    from cutaway.experiments.diff import Diff

__all__ = ["diff"]

FILES = (".npz", ".safetensors")


@command
def diff(
    output: OutputOptions,
    a: Annotated[str, typer.Argument(help="A model: a path, a catalogue name, or a hub id.")],
    b: Annotated[
        str | None,
        typer.Argument(help="Another model, or a .npz or .safetensors file of tensors. Default: the same model."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; `-` or nothing reads stdin.")
    ] = None,
    set_a: Annotated[
        list[str] | None, typer.Option("--a", metavar="NAME=VALUE", help="A setting of A, such as activations=f32.")
    ] = None,
    set_b: Annotated[
        list[str] | None, typer.Option("--b", metavar="NAME=VALUE", help="A setting of B, such as kv_type=q8_0.")
    ] = None,
    tap: Annotated[
        list[str] | None, typer.Option("--tap", metavar="PATTERN", help="Compare these tensors. Repeatable.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Relative difference of a tensor from which on it departs.")
    ] = 1e-3,
) -> None:
    """Compare two runs tap by tap: two models, one under two settings, or a model against saved tensors.

    A file may use this Program's names or Hugging Face's: modules, hidden_states.0 and so on (the last of those is
    after the final norm), logits. Its token_ids are used where it holds them, else those of the prompt.
    """
    sides = settings(set_a or (), LOADING, "--a"), settings(set_b or (), LOADING, "--b")
    from cutaway.experiments.diff import DEFAULT_TAPS, diff_models
    from cutaway.render.views.diff import diff as view

    patterns = tuple(tap) if tap else DEFAULT_TAPS
    result: Diff
    if b is not None and b.endswith(FILES):
        result = _against_file(a, Path(b), sides[0], prompt, patterns if tap else None, tolerance)
    else:
        text = read_prompt(prompt)
        models = open_sides((a, b), sides)
        names = labels((a, b), (set_a or (), set_b or ()))
        result = diff_models(*models, text, patterns, tolerance=tolerance, labels=names)
    deliver(view(result, output.language), result, output)


def _against_file(
    model: str,
    path: Path,
    loading: dict[str, Any],
    prompt: str | None,
    patterns: tuple[str, ...] | None,
    tolerance: float,
) -> Diff:
    from cutaway.cli.loading import locate
    from cutaway.errors import RequestError
    from cutaway.experiments.diff import diff as compared
    from cutaway.experiments.diff import record
    from cutaway.experiments.passes import prompt_ids
    from cutaway.experiments.tensors import from_hugging_face, load_tensors
    from cutaway.forward.taps import matching
    from cutaway.llm import LLM

    saved = load_tensors(path)
    kept = saved.pop("token_ids", None)
    read: str | list[int] = read_prompt(prompt) if kept is None else [int(i) for i in kept.reshape(-1)]
    llm = LLM(locate(model), **loading)
    ids = prompt_ids(llm, read)
    theirs, unknown = from_hugging_face(saved, llm.program)
    left_over = [name for name in unknown if not name.endswith(".attn.weights")]  # `trace --save` writes them too
    if left_over:
        note(f"not compared, names unknown here: {', '.join(left_over[:6])}" + " ..." * (len(left_over) > 6))
    names = [name for name in matching(llm.program, patterns or ("*",)) if name in theirs]
    if not names:
        raise RequestError(f"{path.name} holds no tensor to compare", found=", ".join(list(saved)[:4]) or "nothing")
    ours = record(llm, ids, names)
    asked = {name: theirs[name] for name in names}
    return compared(llm.program, asked, ours, tolerance=tolerance, labels=(path.name, llm.name))
