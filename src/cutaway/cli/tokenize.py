"""`cutaway tokenize`: text to token ids and pieces, or ids back to text. Read next: `pull.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from cutaway.cli.loading import locate
from cutaway.cli.options import JsonFlag, command
from cutaway.cli.reading import read_prompt
from cutaway.cli.screen import show, write
from cutaway.errors import RequestError

__all__ = ["Piece", "tokenize"]


@dataclass(frozen=True)
class Piece:
    """One token. In `text`, bytes that are no whole character are written `\\xNN`; `special`: a control token."""

    id: int
    text: str
    bytes: list[int]
    special: bool


@command
def tokenize(
    text: Annotated[str | None, typer.Argument(help="The text; `-` or nothing reads stdin.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", envvar="CUTAWAY_MODEL", help="Whose vocabulary.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The text is token ids: turn them back into text.")] = False,
    special: Annotated[
        bool, typer.Option("--special", help="Read the text of control tokens, such as <|im_end|>, as those tokens.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show the tokens of a text.

    Nothing is added before or after it, and no chat template is applied (`cutaway run --show-prompt` shows that).
    """
    given = read_prompt(text, "text")
    from cutaway.files import checkpoint
    from cutaway.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(checkpoint.load(locate(model)).vocabulary)
    tokens = _numbers(given, tokenizer.vocab_size) if ids else tokenizer.encode(given, special=special)
    if ids and not json:
        write(tokenizer.decode(tokens) + "\n")
        return
    pieces = [
        Piece(i, tokenizer.token_text(i), list(tokenizer.token_bytes(i)), tokenizer.is_special(i)) for i in tokens
    ]
    from cutaway.render.document import Column, Document, Table

    table = Table(
        [Column("Position", format="id"), Column("Id", format="id"), Column("Piece", wrap=True), "Bytes", "Special"],
        [
            (n, piece.id, piece.text, bytes(piece.bytes).hex(" "), "yes" if piece.special else "")
            for n, piece in enumerate(pieces)
        ],
    )
    count = f"Tokens: {len(tokens):,}"
    whole = {"text": tokenizer.decode(tokens), "ids": tokens, "pieces": pieces}
    show(Document(count, [table]), whole, json)


def _numbers(text: str, vocab_size: int) -> list[int]:
    parts = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise RequestError("token ids", found=repr(text[:40]), expected="whole numbers", param="text") from None
    wrong = next((number for number in numbers if not 0 <= number < vocab_size), None)
    if wrong is not None:
        raise RequestError("no such token id", found=wrong, expected=f"0 to {vocab_size - 1}", param="text")
    return numbers
