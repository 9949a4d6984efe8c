"""Named tensors in files: save and load npz and safetensors, and the names Hugging Face gives the same tensors.

Opens tensor files and nothing else; pickled arrays are refused. Read next: `diff.py`, which compares what was saved.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cutaway.errors import FormatError, NotFoundError, RequestError
from cutaway.forward.program import Program

__all__ = ["from_hugging_face", "hugging_face_names", "load_tensors", "save_tensors"]

_KINDS = (".npz", ".safetensors")
_HIDDEN_STATE = re.compile(r"hidden_states?[._\[]?(\d+)\]?$")


def save_tensors(path: str | Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write named tensors; the suffix chooses the format.

    Raises: RequestError for a suffix other than .npz and .safetensors.
    """
    path = Path(path)
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, path, metadata={"format": "np"})
    else:
        raise RequestError("cannot save tensors there", found=path.name, expected=" or ".join(_KINDS), param="save")
    return path


def load_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Read named tensors from an .npz or .safetensors file.

    Raises: NotFoundError, FormatError (damaged, or holds pickled objects), RequestError for another suffix.
    """
    path = Path(path)
    if path.suffix not in _KINDS:
        raise RequestError("cannot read tensors from this file", found=path.name, expected=" or ".join(_KINDS))
    if not path.is_file():
        raise NotFoundError(f"no file {path}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        return _load_safetensors(path)
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise FormatError(f"{path.name} cannot be read as tensors", found=str(error)) from error


def _load_safetensors(path: Path) -> dict[str, np.ndarray]:
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise FormatError(f"{path.name} cannot be read as tensors", found=str(error)) from error


def hugging_face_names(program: Program) -> dict[str, str]:
    """Name of each tensor of the Program -> name of the same tensor in Hugging Face transformers.

    Two families of names: the module whose output it is (`model.layers.3.self_attn.q_proj`), and, for the residual
    stream, `hidden_states.i` as `output_hidden_states=True` numbers it. The trap there: a model of L layers gives
    L + 1 hidden states, `hidden_states.0` is the embedding, `hidden_states.i` the residual after layer i - 1, but the
    last one, `hidden_states.L`, is taken AFTER the final norm. So it is our `final_norm`, and the last layer's
    residual has no hidden state of its own (its module name finds it).
    """
    names = {op.name: op.module for op in program if op.module}
    names["embed"] = "hidden_states.0"
    layers = program.config.num_layers
    for layer in range(layers - 1):
        names[f"layers.{layer}.residual"] = f"hidden_states.{layer + 1}"
    names["final_norm"] = f"hidden_states.{layers}"
    names["logits"] = "logits"
    return names


def from_hugging_face(
    tensors: Mapping[str, np.ndarray], program: Program
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Give a dump the Program's names: `(renamed, left over)`.

    Understands our own names, module paths (with or without `.output`), `hidden_states.i` (also `_i` and `[i]`),
    `logits` and `lm_head`. A leading batch dimension of 1 is dropped.
    """
    theirs = {theirs: ours for ours, theirs in hugging_face_names(program).items()}
    theirs.update({op.module: op.name for op in program if op.module})
    renamed: dict[str, np.ndarray] = {}
    left_over = []
    for name, value in tensors.items():
        plain = name.removesuffix(".output")
        hidden = _HIDDEN_STATE.fullmatch(plain)
        ours = name if name in program else theirs.get(f"hidden_states.{hidden[1]}" if hidden else plain)
        if ours is None:
            left_over.append(name)
        else:
            renamed[ours] = value[0] if value.ndim == 3 and value.shape[0] == 1 else value
    return renamed, tuple(left_over)
