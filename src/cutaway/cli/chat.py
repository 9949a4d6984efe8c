"""`cutaway chat`: a conversation in the terminal.

Holds the loop that reads lines; what a line does is in `conversation.py`, read next. Works with a pipe as well: each
line is a turn, and only the answers go to stdout.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cutaway.cli.options import ModelOptions, SamplingOptions, command
from cutaway.cli.screen import note

__all__ = ["chat"]

QUOTES = '"""'


@command
def chat(
    options: ModelOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option("--system", "-s", help="The system turn.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Times and rates after each answer, on stderr.")] = False,
) -> None:
    """Talk with a model, turn by turn. /help lists what can be typed besides messages.

    Ctrl-C stops the answer; at the prompt it leaves. A message over several lines stands between \"\"\" and \"\"\".
    """
    if sampling.n not in (None, 1):
        raise typer.BadParameter("chat gives one answer", param_hint="--n")
    from cutaway.cli.conversation import Conversation
    from cutaway.cli.loading import open_model

    llm = open_model(options)
    conversation = Conversation(llm, sampling, system, stats)
    interactive = sys.stdin.isatty()
    if interactive:
        note(f"{llm.name}. /help for help, /bye or Ctrl-D to leave.")
    with _history() if interactive else contextlib.nullcontext():
        for text in _turns(interactive):
            if not conversation.take(text):
                break


def _turns(interactive: bool) -> Iterator[str]:
    """What is typed, one turn a time: a line, or the lines between triple quotes."""
    while True:
        line = _line(">>> " if interactive else "")
        if line is None:
            break
        if line.lstrip().startswith(QUOTES):
            text = line.lstrip()[len(QUOTES) :]
            while QUOTES not in text:
                following = _line("... " if interactive else "")
                if following is None:
                    break
                text += "\n" + following
            yield text.partition(QUOTES)[0].strip("\n")
        elif line.strip():
            yield line
    if interactive:
        note("")


def _line(prompt: str) -> str | None:
    """One line without its end, or None at the end of input. The prompt is shown by readline, on the terminal."""
    if prompt:
        try:
            return input(prompt)
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing, with the lines of earlier conversations where readline is there."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = state / "cutaway" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
