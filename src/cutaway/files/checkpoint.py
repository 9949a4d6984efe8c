"""A model's files as one object: config, weights, vocabulary, and the settings they carry.

`load` takes a GGUF file or a Hugging Face folder and gives the same `Checkpoint` for both; weights stay views of the
memory-mapped files. Knows paths, no names of models (`store.py` turns a name into a path). Read next: `gguf_model.py`
and `hf_model.py`, which read the two kinds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutaway.config import ModelConfig
from cutaway.errors import NotFoundError, UnsupportedError, reading
from cutaway.files import gguf_model
from cutaway.files.gguf import read_gguf
from cutaway.files.hf_model import Folder
from cutaway.files.safetensors import find_safetensors
from cutaway.quant import Weight
from cutaway.text.tokenizer import Vocabulary

__all__ = ["Checkpoint", "load"]


@dataclass(frozen=True)
class Checkpoint:
    """Everything a model's files say.

    `weights` are named as in the Program of `forward/decoder.py`. `eos_ids` unites every source in the files.
    `generation` holds the sampling settings the files carry, unapplied. `metadata` is the raw GGUF metadata or
    config.json.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    config: ModelConfig
    weights: Mapping[str, Weight]
    vocabulary: Vocabulary
    chat_template: str | None
    eos_ids: frozenset[int]
    generation: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def add_bos(self) -> bool:
        return self.vocabulary.add_bos

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, as stored."""
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def params(self) -> int:
        """Number of weight values; a tied head counts once."""
        return sum(weight.params for weight in self.weights.values())


def load(path: str | Path) -> Checkpoint:
    """Read a model from a .gguf file (any part of a split one) or a Hugging Face folder (or the weights inside it).

    A folder is read as a Hugging Face folder whatever else lies in it; a GGUF file there is opened by its own name.

    Raises: NotFoundError, FormatError (damaged or hostile), UnsupportedError (asks for what is not implemented),
    LoadError (the system does not let it be read, or has not the memory).
    """
    path = Path(path)
    if not os.path.exists(path):  # os.path: never raises, whatever the name
        raise NotFoundError(f"{path} does not exist", expected="a .gguf file or a Hugging Face folder")
    with reading(path):
        if path.is_dir():
            return _from_folder(path)
        if path.suffix != ".safetensors":
            return _from_gguf(path)
        _check_folder(path.parent)
        if path not in find_safetensors(path.parent):
            raise UnsupportedError(
                f"{path} is not among the weights of its folder", hint="name the folder, to use those"
            )
        return _from_folder(path.parent)


def _from_gguf(path: Path) -> Checkpoint:
    gguf = read_gguf(path)
    config = gguf_model.read_config(gguf)
    vocabulary = gguf_model.read_vocabulary(gguf, config.vocab)
    name, template = gguf.metadata.get("general.name"), gguf.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        name=name if isinstance(name, str) and name else path.stem,
        path=path,
        files=gguf.files,
        config=config,
        weights=gguf_model.read_weights(gguf, config),
        vocabulary=vocabulary,
        chat_template=template if isinstance(template, str) else None,
        eos_ids=gguf_model.read_eos_ids(gguf, vocabulary),
        generation=gguf_model.read_generation(gguf),
        metadata=gguf.metadata,
    )


def _from_folder(path: Path) -> Checkpoint:
    _check_folder(path)
    folder = Folder(path)
    eos_ids, config = folder.read_eos_ids(), folder.read_config()
    config, weights, files = folder.read_weights(config)
    return Checkpoint(
        name=_folder_name(path),
        path=path,
        files=files,
        config=config,
        weights=weights,
        vocabulary=folder.read_vocabulary(),
        chat_template=folder.read_chat_template(),
        eos_ids=eos_ids,
        generation=folder.generation.values,
        metadata=folder.config.values,
    )


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"name one of its GGUF files: {', '.join(ggufs[:5])}" if ggufs else None
        raise NotFoundError(f"{path} is not a Hugging Face folder", expected="config.json in it", hint=hint)


def _folder_name(path: Path) -> str:
    """The folder's name; in a Hugging Face cache (models--ORG--NAME/snapshots/COMMIT) the name of the repository."""
    path = path.absolute()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository[len("models--") :].replace("--", "/")
    return path.name
