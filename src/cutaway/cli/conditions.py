"""Two sides of a comparison on the command line: a model and its settings each, as NAME=VALUE.

Read next: `diff.py` and `compare.py`, the two verbs that compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from cutaway.cli.faults import usage
from cutaway.cli.options import MAX_COUNT, MAX_THREADS, ModelOptions, whole

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["LOADING", "SAMPLING", "labels", "open_sides", "settings"]

_YES = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}

LOADING: dict[str, type] = {
    "activations": str,
    "interpreter": str,
    "kv_type": str,
    "k_type": str,
    "v_type": str,
    "threads": int,
    "max_context": int,
    "chunk": int,
    "kv_cache": bool,
    "prefix_cache": bool,
}
_BOUNDS = {"threads": (1, MAX_THREADS), "max_context": (2, MAX_COUNT), "chunk": (1, MAX_COUNT)}

SAMPLING: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
    "ignore_eos": bool,
    "dialect": str,
}


def settings(given: Sequence[str], known: dict[str, type], option: str) -> dict[str, Any]:
    """`["kv_type=q8_0", "threads=1"]` as values of their types. Wrong usage is told by the option's name."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in known:
            raise typer.BadParameter(f"{option} takes NAME=VALUE with one of {', '.join(known)}; not {one!r}")
        try:
            found[name] = _YES[text.strip().lower()] if known[name] is bool else known[name](text)
        except (ValueError, KeyError):
            raise typer.BadParameter(f"{option} {name} takes a {known[name].__name__}, not {text!r}") from None
    _judge(found, option)
    return found


def _judge(found: dict[str, Any], option: str) -> None:
    """The rules of the options with the same names. Wrong usage is told before a model is opened."""
    from cutaway.engine.sampling import SamplingParams

    for name, (low, high) in _BOUNDS.items():
        if name in found:
            whole(f"{option} {name}", str(found[name]), low, high)
    types = {field.name for field in fields(ModelOptions)}
    with usage():
        ModelOptions(**{name: value for name, value in found.items() if name in types}).check()
        SamplingParams(**{name: value for name, value in found.items() if name in SAMPLING})


def labels(models: tuple[str, str | None], given: tuple[Sequence[str], Sequence[str]]) -> tuple[str, str]:
    """What the sides are called: their models, where they differ, and what was set for each."""
    apart = models[1] is not None and models[1] != models[0]
    a, b = (" ".join([*([model or ""] if apart else []), *own]) for model, own in zip(models, given, strict=True))
    return (a or "default", b or "default") if a != b else (f"{a or 'default'} (A)", f"{b or 'default'} (B)")


def open_sides(
    models: tuple[str | None, str | None], loading: tuple[dict[str, Any], dict[str, Any]]
) -> tuple[LLM, LLM]:
    """Both models; one object where both sides ask for the same."""
    from cutaway.cli.loading import locate
    from cutaway.llm import LLM

    paths = (locate(models[0]), locate(models[1] if models[1] is not None else models[0]))
    first = LLM(paths[0], **loading[0])
    return first, first if paths[0] == paths[1] and loading[0] == loading[1] else LLM(paths[1], **loading[1])
