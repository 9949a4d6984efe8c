"""`cutaway models`: the models that have a name, where they come from and whether they are here.

Read next: `loading.py`.
"""

from __future__ import annotations

from cutaway.cli.options import JsonFlag, command
from cutaway.cli.screen import show

__all__ = ["models"]


@command
def models(json: JsonFlag = False) -> None:
    """List the models that have a name, with their sources and licences."""
    from cutaway.files import store
    from cutaway.render.document import Block, Column, Document, Table, Text

    here = {model.name: model for model in store.installed()}
    found = [
        {
            "name": entry.name,
            "title": entry.title,
            "file_bytes": entry.file_bytes,
            "licence": entry.licence,
            "provenance": entry.provenance,
            "sha256": entry.sha256,
            "default": entry.name == store.DEFAULT,
            "path": str(here[entry.name].path) if entry.name in here else None,
        }
        for entry in store.CATALOGUE.values()
    ]
    own = [model for model in here.values() if model.entry is None]
    found += [{"name": m.name, "title": "", "file_bytes": m.file_bytes, "path": str(m.path)} for m in own]
    table = Table(
        ["Name", "Model", Column("Size", format="bytes"), "Here"],
        [(m["name"], m["title"], m["file_bytes"], "yes" if m["path"] else "no") for m in found],
    )
    blocks: list[Block] = [table]
    for entry in store.CATALOGUE.values():
        blocks.append(Text(f"{entry.name}: {entry.licence}. {entry.provenance}. SHA-256 {entry.sha256}."))
    blocks.append(Text(f"Kept in {store.home()}. The default is {store.DEFAULT}."))
    show(Document("Models", blocks), found, json)
