"""Write docs/cli.md from the options themselves: `python docs/make_cli.py`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from cutaway.cli import application

__all__ = ["page"]

HEAD = r"""# The command line

Made by `python docs/make_cli.py`; `cutaway VERB --help` says the same.

Results go to stdout, everything else to stderr. Every fault is one line there, `cutaway: error: ...`.

| Exit status | |
|---|---|
| 0 | Done. |
| 1 | A known error: a file, a model, a request it cannot take, memory, a result that cannot be written. |
| 2 | Wrong usage: found before a file is opened. |
| 130 | Stopped by Ctrl-C. What was being written is left as it was before. |
| 141 | The reader of stdout has left (`cutaway ... \| head`): no more is computed, nothing is said. |

The streams. If stdout is closed or its disk full, that is an error (1). What stderr cannot take is dropped. A closed
stdin is an empty one. Text that comes in, from an argument, a pipe, a file or a line of `chat`, is UTF-8 whatever the
locale says: a leading U+FEFF is dropped, and the last line end (`\n` or `\r\n`); a wrong byte is an error that names
its offset. With a prompt, `run` puts the text of a pipe after it: `git diff | cutaway run "Explain this:"`; other verbs
that are given their text leave the pipe alone.

Text from models, files and conversations never steers a terminal: control characters (C0, C1), bidirectional and other
format characters and line separators (U+2028, U+2029) are shown as signs such as `␛` or `\u{9b}`: on stderr always, on
stdout when it is a terminal. A pipe gets an answer as it is; JSON is ASCII. Files are written whole or not at all.

`NO_COLOR` turns colour off. `CUTAWAY_HOME` is where models are kept, `CUTAWAY_ISA` the instruction set to use
(`scalar`, `avx2`).
"""
OWN = "Options"

Verb = Callable[..., None]
Panels = dict[str, list[str]]  # title -> rows


def page() -> str:
    """The whole page: a section a verb, then the groups of options that several verbs have alike."""
    found = verbs(application(), "cutaway")
    every = [panels(verb) for _, verb in found]
    shared = {
        title: rows
        for own in every
        for title, rows in own.items()
        if title != OWN
        and sum(title in other for other in every) > 1
        and all(o.get(title, rows) == rows for o in every)
    }
    parts = [HEAD, *(section(name, verb, shared) for name, verb in found)]
    if shared:
        parts.append("## Options that verbs share\n\n" + "\n".join(table(*panel) for panel in shared.items()))
    return "\n".join(parts).rstrip() + "\n"


def verbs(app: typer.Typer, prefix: str) -> list[tuple[str, Verb]]:
    """Every verb of `app` and of its groups with its full name, in order."""
    found = [(f"{prefix} {command.name}", command.callback) for command in app.registered_commands]
    for group in app.registered_groups:
        found += verbs(group.typer_instance, f"{prefix} {group.name}")
    return found


def parameters(verb: Verb, kind: type) -> list[tuple[inspect.Parameter, Any, Any]]:
    """The arguments or the options of a verb: parameter, type, what typer is told."""
    each = ((p, *typing.get_args(p.annotation)) for p in inspect.signature(verb).parameters.values())
    return [(p, annotation, info) for p, annotation, info in each if isinstance(info, kind)]


def panels(verb: Verb) -> Panels:
    """The rows of each group of options, the verb's own first."""
    found: Panels = {OWN: []}
    for parameter, annotation, info in parameters(verb, OptionInfo):
        found.setdefault(info.rich_help_panel or OWN, []).append(option_row(annotation, info, parameter.default))
    return {title: rows for title, rows in found.items() if rows}


def section(name: str, verb: Verb, shared: Panels) -> str:
    """One verb: what it does, its usage, its options."""
    arguments = [(p.name.upper(), p.default is p.empty, info.help) for p, _, info in parameters(verb, ArgumentInfo)]
    own = panels(verb)
    usage = [name, *(word if needed else f"[{word}]" for word, needed, _ in arguments), *(["[OPTIONS]"] if own else [])]
    lines = [f"## `{name}`\n", inspect.cleandoc(verb.__doc__ or ""), f"\n    {' '.join(usage)}\n"]
    lines += [f"`{word}`: {help}\n" for word, _, help in arguments]
    lines += [table(title, rows) for title, rows in own.items() if title not in shared]
    elsewhere = [title for title in own if title in shared]
    if elsewhere:
        lines.append(f"Also, below: {', '.join(elsewhere)}.\n")
    return "\n".join(lines)


def table(title: str, rows: list[str]) -> str:
    return "\n".join([f"| {title} | |", "|---|---|", *rows, ""])


def option_row(kind: Any, info: Any, default: Any) -> str:
    """One option: its names, what it takes, what it does."""
    names = ", ".join(f"`{name}`" for name in (info.default, *info.param_decls))
    types = {kind, *typing.get_args(kind), *(a for k in typing.get_args(kind) for a in typing.get_args(k))}
    if bool not in types:
        names += " " + (info.metavar or ("N" if int in types else "X" if float in types else "TEXT"))
    text = info.help.replace("|", "\\|").replace("<", "&lt;")
    if default not in (None, False):
        text += f" Default: {default}."
    if info.envvar:
        text += f" Environment: `{info.envvar}`."
    return f"| {names} | {text} |"


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page(), encoding="utf-8")
