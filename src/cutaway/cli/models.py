"""`cutaway models`: the models of the catalogue and where they are. Read next: `loading.py`."""

from __future__ import annotations

from cutaway.cli.options import JsonFlag, command

__all__ = ["models"]


@command
def models(json: JsonFlag = False) -> None:
    """List the models that have a name, with their sources and licences."""
