"""`cutaway run`: one prompt, one answer, streamed. Read next: `answer.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cutaway.cli.options import JsonFlag, ModelOptions, SamplingOptions, command
from cutaway.cli.reading import piped, read_prompt
from cutaway.cli.screen import note, show, write

__all__ = ["run"]


@command
def run(
    options: ModelOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; `-` or nothing reads stdin. The text of a pipe follows it.")
    ] = None,
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
    if prompt not in (None, "-"):
        text = "\n\n".join(part for part in (text, piped()) if part)
    from cutaway.cli.answer import stats_document, stream_answers
    from cutaway.cli.loading import open_model

    llm = open_model(options)
    settings = sampling.resolve(llm.checkpoint.generation)
    system_turn = [{"role": "system", "content": system}] if system is not None else []
    asked = text if raw else [*system_turn, {"role": "user", "content": text}]
    if show_prompt:
        note(asked if isinstance(asked, str) else llm.chat_prompt(asked))
    results, interrupted = stream_answers(llm, asked, settings, (lambda piece: None) if json else write)
    if json or stats:
        document = stats_document(llm, results, settings)
        if json:
            show(document, {"model": llm.name, "answers": results, "settings": settings}, as_json=True)
        if stats:
            show(document, None, as_json=False, to="stderr")
    if interrupted:
        raise KeyboardInterrupt
