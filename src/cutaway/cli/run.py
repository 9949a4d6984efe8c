"""`cutaway run`: one prompt, one answer, streamed. Read next: `answer.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cutaway.cli.options import JsonFlag, ModelOptions, SamplingOptions, command
from cutaway.cli.screen import note, read_prompt, write

__all__ = ["run"]


@command
def run(
    options: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", "-s", help="The system turn.")] = None,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="First show the exact text the model gets, on stderr.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Then show times, rates, and where each setting came from, on stderr.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Answer one prompt.

    The answer streams to stdout. The default model is downloaded at first use. Ctrl-C ends the answer.
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, --raw is without it")
    text = read_prompt(prompt)
    from cutaway.cli.answer import as_json, stats_table, stream_answer
    from cutaway.cli.loading import open_model

    llm = open_model(options)
    settings = sampling.resolve(llm.checkpoint.generation)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    asked = text if raw else messages
    if show_prompt:
        note(llm.chat_prompt(messages) if not raw else text)
    answer = stream_answer(llm, asked, settings, (lambda piece: None) if json else write)
    if json:
        write(as_json(llm, answer, settings))
    else:
        write("\n")
    if stats:
        note(stats_table(llm, answer, settings))
    if answer.interrupted:
        raise SystemExit(130)
