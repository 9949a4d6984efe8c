"""The safetensors format: the tensor table of a memory-mapped file, and a model spread over several of them.

    u64 header length, JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}, data

The header is read here and not by the `safetensors` library so that the same rules hold as for GGUF: everything is
compared with the file's size before anything is made from it, and every error names the file and the tensor. Weights
stay views of the map. Read next: `hf_model.py`.

Source: the format description in the safetensors repository.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from cutaway.errors import FormatError, NotFoundError, UnsupportedError
from cutaway.files.fields import parse_json, read_json, shown
from cutaway.files.mapped import MappedFile
from cutaway.quant import Weight

__all__ = ["find_safetensors", "read_safetensors"]

MAX_HEADER_BYTES = 16 << 20
ITEM_BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}


def find_safetensors(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files of a Hugging Face folder, each with the tensors the index expects in it (None: no index).

    Raises: NotFoundError (no weights, or a shard is missing), FormatError (a senseless index, or a model.safetensors
    beside an index of other files: only their author knows which of the two is the model), UnsupportedError (only
    pickled weights, which are never opened).
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        if single.is_file():
            return {single: None}
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]
        if pickled:
            raise UnsupportedError(f"{folder} holds pickled weights ({pickled[0].name}), which are never opened",
                                   hint="convert them to safetensors")  # fmt: skip
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"name one of its GGUF files: {', '.join(ggufs[:5])}" if ggufs else None
        raise NotFoundError(f"{folder} holds no weights", expected=f"{single.name} or {index.name}", hint=hint)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: weight_map", found=type(weight_map).__name__, expected="tensor names to files")
    shards: dict[Path, list[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise FormatError(f"{index}: file of {tensor}", found=shown(name), expected="a .safetensors file beside it")
        shards.setdefault(folder / name, []).append(tensor)  # type: ignore[union-attr]
    if single.is_file() and single not in shards:
        raise FormatError(f"{folder} holds {single.name} and {index.name}, which names other files",
                          hint="move the one away that is not the model")  # fmt: skip
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise NotFoundError(f"{index} names {len(shards)} files: {missing[0]} is missing", hint="fetch the model again")
    return shards


def read_safetensors(path: Path) -> dict[str, Weight]:
    """The tensors of one file under their own names, as views of the map.

    Raises: FormatError: the header is senseless, or the data is not exactly the bytes that the header describes.
    """
    file = MappedFile(path, "a safetensors file")
    if file.size < 8:
        raise file.error("is too short", f"{file.size} bytes", "at least 8 bytes")
    header_bytes = struct.unpack_from("<Q", file.bytes)[0]
    start = 8 + header_bytes
    if file.bytes[8:9] not in (b"{", b""):
        raise file.not_this_kind("has no JSON header")
    if header_bytes > MAX_HEADER_BYTES or start > file.size:
        limit = min(MAX_HEADER_BYTES, file.size - 8)
        raise file.error("length of the header (cut download?)", f"{header_bytes} bytes", f"at most {limit} bytes")
    header = parse_json(path, file.bytes[8:start])
    header.pop("__metadata__", None)

    entries = [(*_entry(file, name, entry), name) for name, entry in header.items()]
    tensors: dict[str, Weight] = {}
    position = 0
    for begin, end, dtype, shape, name in sorted(entries):
        if begin != position:
            problem = "lies over another one" if begin < position else "leaves bytes unused before it"
            raise file.error(f"tensor {name} {problem}", f"begin {begin}", position)
        position = end
        if start + end > file.size:
            break
        data = file.array[start + begin : start + end]
        rows = math.prod(shape[:-1])
        tensors[name] = Weight(name, dtype, shape, data.reshape(rows, -1) if data.size else data.reshape(rows, 0))
    end_of_data = start + max((entry[1] for entry in entries), default=0)
    if end_of_data != file.size:
        cut = " (cut download?)" if end_of_data > file.size else ""
        raise file.error(f"size of the file{cut}", f"{file.size} bytes", f"{end_of_data} bytes")
    return tensors


def _entry(file: MappedFile, name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """begin, end, dtype and shape of one tensor, checked against each other."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UnsupportedError(f"{file.path}: dtype of tensor {name}", found=shown(dtype), expected="F32 F16 BF16")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        found = f"shape {str(shape)[:60]}, data_offsets {str(offsets)[:60]}"
        raise file.error(f"tensor {name}", found, "lists of whole numbers")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        expected = f"{math.prod(shape) * ITEM_BYTES[dtype]} bytes for {dtype} {shape}"
        raise file.error(f"data_offsets of tensor {name}", f"{begin} to {end}", expected)
    return begin, end, dtype, tuple(shape)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
