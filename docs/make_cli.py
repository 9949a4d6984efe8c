"""Write docs/cli.md from the options themselves: `python docs/make_cli.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from cutaway.cli import application

__all__ = ["page"]

HEAD = """\
# The command line

Made by `python docs/make_cli.py`; `cutaway VERB --help` says the same.

Results go to stdout, everything else to stderr. Exit status: 0 done, 1 a known error (one line, `cutaway: error: ...`), 2 wrong
usage, 130 stopped by Ctrl-C. `NO_COLOR` turns colour off. `CUTAWAY_HOME` is where models are kept, `CUTAWAY_ISA` the instruction
set to use (`scalar`, `avx2`).
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, verb in commands(typer.main.get_command(application()), "cutaway"):
        parts.append(section(name, verb))
    return "\n".join(parts)


def commands(group: Any, prefix: str) -> list[tuple[str, Any]]:
    """Every command below `group` with its full name, in order."""
    found = []
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        found += commands(command, full) if hasattr(command, "commands") else [(full, command)]
    return found


def section(name: str, command: Any) -> str:
    """One verb: its sentence, its usage, its options by group."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
    usage = " ".join([name, *(_argument(p) for p in arguments), "[OPTIONS]" if options else ""]).strip()
    lines = [f"## `{name}`", "", *command.help.strip().splitlines(), "", f"    {usage}", ""]
    for argument in arguments:
        if argument.help:
            lines += [f"`{_bare(argument)}`: {argument.help}", ""]
    groups: dict[str, list[Any]] = {}
    for option in options:
        groups.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    for title, members in groups.items():
        lines += [f"| {title} | |", "|---|---|", *map(_row, members), ""]
    return "\n".join(lines)


def _bare(argument: Any) -> str:
    return (argument.metavar or argument.name).upper().strip("[]").removesuffix("...")


def _argument(argument: Any) -> str:
    dots = "..." if argument.nargs == -1 else ""
    return f"{_bare(argument)}{dots}" if argument.required else f"[{_bare(argument)}{dots}]"


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    if not option.is_flag:
        kind = option.metavar or {"integer": "N", "float": "X", "text": "TEXT"}.get(option.type.name, option.type.name)
        names += f" {kind.upper() if option.metavar is None else kind}"
    text = (option.help or "").replace("|", "\\|")
    if option.default not in (None, False, (), []):
        text += f" Default: {option.default}."
    if option.envvar:
        text += f" Environment: `{option.envvar}`."
    return f"| {names} | {text} |"


if __name__ == "__main__":
    os.environ.pop("CUTAWAY_MODEL", None)
    Path(__file__).with_name("cli.md").write_text(page(), encoding="utf-8")
