"""`cutaway pull`: bring a model to this machine. Read next: `models.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cutaway.cli.loading import locate
from cutaway.cli.options import command
from cutaway.cli.screen import write

__all__ = ["pull"]


@command
def pull(
    model: Annotated[
        str | None, typer.Argument(help="A catalogue name or a hub id. Default: the default model.")
    ] = None,
) -> None:
    """Download a model, check it, and print where it lies.

    A download that was cut off goes on where it stopped. A model that is already here is left alone.
    """
    write(f"{locate(model)}\n")
