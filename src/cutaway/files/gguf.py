"""The GGUF format, versions 2 and 3: metadata and tensor table of a memory-mapped file.

    "GGUF"  u32 version  u64 tensor_count  u64 metadata_count
    metadata:  string key, u32 type, value             string = u64 length, bytes
    tensors:   string name, u32 n_dims, u64 dims[n_dims], u32 format, u64 offset
    padding to `general.alignment`, then the tensors' data; offsets count from there

A file is hostile until proven: every count and length is compared with the bytes that are left before anything is
made from it, so a file costs at most a small multiple of its own size. Arrays stay in the map: numbers as views,
strings as a `StringArray` whose items are decoded when they are asked for.

Knows nothing of architectures or of what a key means, `general.alignment` and `split.*` excepted. Read next:
`gguf_model.py`, which turns keys and tensors into a model.

Source: ggml `docs/gguf.md`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from cutaway.errors import FormatError, NotFoundError, UnsupportedError
from cutaway.files.mapped import MappedFile
from cutaway.quant import FORMATS, Weight

__all__ = ["GGUF", "StringArray", "read_gguf"]

STRING, ARRAY = 8, 9
# value type -> struct code (also NumPy's)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES = """
    F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S
    IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4
    IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4
"""
TENSOR_TYPES = dict(enumerate(_TYPE_NAMES.split()))  # those not in FORMATS are only here to be refused by name
MAX_DIMS = 4
MAX_ENTRIES = 1 << 16  # keys, and tensors of one file: the largest models have a few thousand
MIN_METADATA_BYTES = 8 + 1 + 4 + 1  # a key of one character and a one-byte value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
MIN_REACH, MAX_REACH = 1 << 10, 1 << 17  # bytes in which the lengths of strings are looked for at once
_U64 = struct.Struct("<Q")
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


class StringArray(Sequence[str]):
    """Strings that lie in a file: string i is `data[begins[i] : ends[i]]`, decoded each time it is asked for."""

    def __init__(self, file: MappedFile, begins: np.ndarray, ends: np.ndarray) -> None:
        self._file, self.data, self.begins, self.ends = file, file.array, begins, ends

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._text(index, int(self.begins[index]), int(self.ends[index]))

    def __iter__(self) -> Iterator[str]:
        return map(self._text, range(len(self)), self.begins.tolist(), self.ends.tolist())

    def _text(self, index: int, begin: int, end: int) -> str:
        try:
            return str(self._file.bytes[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise self._file.error(f"string {index} of an array is not UTF-8", found=error.object[:40]) from None


@dataclass(frozen=True)
class GGUF:
    """All parts of a model: the first part's metadata, every part's tensors under the names of the file.

    A tensor's `shape` is row-major: the last dimension is the contiguous one (GGUF stores it first).
    """

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Weight]


def read_gguf(path: Path) -> GGUF:
    """Read a GGUF file, and with any part of a split model all its parts.

    Raises: NotFoundError (no file, or a part is missing), FormatError, UnsupportedError (a tensor type).
    """
    part = _Part(path)
    count = part.split("count", 1)
    if count <= 1:
        return GGUF(path, (path,), part.metadata, part.tensors)
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) != count or int(name["no"]) != part.split("no") + 1:
        expected = f"a name that ends in -{part.split('no') + 1:05d}-of-{count:05d}.gguf"
        raise part.file.error("is one part of a split model, and its name does not say so", path.name, expected)
    paths = tuple(path.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise NotFoundError(f"{path} needs all {count} parts of the model: {len(missing)} missing ({shown})")
    parts = [part if p == path else _Part(p) for p in paths]
    tensors: dict[str, Weight] = {}
    for i, p in enumerate(parts):
        if (p.split("no"), p.split("count")) != (i, count):
            found = f"split.no {p.split('no')} of {p.split('count')}"
            raise p.file.error("is not the part its name says", found, f"{i} of {count}")
        for twice in tensors.keys() & p.tensors.keys():
            raise p.file.error(f"tensor {twice} is in an earlier part already")
        tensors |= p.tensors
    expected_tensors = parts[0].split("tensors.count", len(tensors))
    if len(tensors) != expected_tensors:
        raise FormatError(
            f"{path}: the parts do not add up", found=len(tensors), expected=f"{expected_tensors} tensors"
        )
    return GGUF(paths[0], paths, parts[0].metadata, tensors)


class _Part:
    """One GGUF file, read from front to back."""

    def __init__(self, path: Path) -> None:
        self.file = file = MappedFile(path, "a GGUF file")
        if file.bytes[:4] != b"GGUF":
            old = file.bytes[:4] in (b"GGML", b"ggml", b"lmgg", b"fmgg", b"tjgg", b"GGJT")
            raise file.not_this_kind("is of a GGML format older than GGUF" if old else "does not start with GGUF")
        self.position = 4
        version = self.number("I", "version")
        if version in (2 << 24, 3 << 24):
            raise UnsupportedError(f"{path}: big-endian GGUF is not implemented", hint="convert it to little-endian")
        if version not in (2, 3):
            raise UnsupportedError(f"{path}: GGUF version", found=version, expected="2 or 3")
        tensor_count = self.count("tensor count", MIN_TENSOR_BYTES, MAX_ENTRIES)
        metadata_count = self.count("metadata count", MIN_METADATA_BYTES, MAX_ENTRIES)
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self.string("a metadata key")
            if not key or key in self.metadata:
                raise file.error("metadata key is empty" if not key else f"metadata key {key} comes twice")
            self.metadata[key] = self.value(key, self.number("I", f"type of {key}"))
        table = [self.tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise file.error("general.alignment", repr(alignment), "a power of two from 8 to 1048576")
        self.alignment = alignment
        self.tensors = self.place(table)

    def split(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"split.{key}", default)
        if type(value) is not int:
            raise self.file.error(f"split.{key}", found=repr(value), expected="a whole number")
        return value

    # -- values ----------------------------------------------------------------------------------------------------

    def need(self, size: int, what: str) -> int:
        """Check that `size` more bytes exist, step over them, and give back where they start."""
        start, left = self.position, self.file.size - self.position
        if size > left:
            raise self.file.error(f"{what} lies past the end of the file", f"{left} bytes", f"{size} bytes")
        self.position = start + size
        return start

    def number(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.file.bytes, self.need(layout.size, what))[0]

    def count(self, what: str, min_bytes: int, most: int | None = None) -> int:
        """A number of items, each of which takes at least `min_bytes` of what is left."""
        count: int = self.number("Q", what)
        left = self.file.size - self.position
        if most is not None and count > most and count * min_bytes <= left:
            raise self.file.error(what, count, f"at most {most}")
        if count * min_bytes > left:
            raise self.file.error(what, count, f"at most {left // min_bytes}, as {left} bytes are left")
        return count

    def string(self, what: str) -> str:
        length = self.number("Q", f"length of {what}")
        start = self.need(length, what)
        try:
            return str(self.file.bytes[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise self.file.error(f"{what} is not UTF-8") from None

    def value(self, key: str, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], key)
        if kind == STRING:
            return self.string(key)
        if kind != ARRAY:
            raise self.file.error(f"type of {key}", kind, "a value type from 0 to 12")
        kind = self.number("I", f"element type of {key}")
        if kind in NUMBERS:
            dtype = np.dtype("<" + NUMBERS[kind])
            size = self.count(f"length of {key}", dtype.itemsize) * dtype.itemsize
            start = self.need(size, key)
            return self.file.array[start : start + size].view(dtype)
        if kind == STRING:
            return self.strings(key, self.count(f"length of {key}", 8))
        if kind == ARRAY:
            raise self.file.error(f"{key} is an array of arrays", expected="an array of numbers or strings")
        raise self.file.error(f"element type of {key}", kind, "a value type from 0 to 12")

    def strings(self, key: str, count: int) -> StringArray:
        """Step over an array of strings: length, bytes, length, bytes, ...

        Going from length to length is slow, so lengths are looked for all at once: nearly every byte with seven zeros
        after it is one. A run of them is taken as far as each leads to the next; the rest is gone through one by one.
        """
        data, size, unpack = self.file.array, self.file.size, _U64.unpack_from
        start = position = self.position
        places = np.empty(count, np.int64)
        done, reach = 0, MIN_REACH
        while done < count and position <= size:
            zero = data[position : position + reach] == 0
            starts = max(len(zero) - 7, 0)  # where a length fits into what is left
            found = ~zero[:starts]
            for i in range(1, 8):
                found &= zero[i : starts + i]
            guesses = position + np.flatnonzero(found)
            ends = guesses + 8 + data[guesses]
            leads = np.append(guesses[:1] == position, ends[:-1] == guesses[1:])  # from the one before it
            run = min(int(np.argmin(np.append(leads, False))), count - done)
            if run:
                places[done : done + run] = guesses[:run]
                position, done = int(ends[run - 1]), done + run
                reach = min(4 * reach, MAX_REACH)
                continue
            reach = MIN_REACH
            for _ in range(min(64, count - done)):
                places[done] = position
                done += 1
                position += 8 + (unpack(self.file.bytes, position)[0] if position + 8 <= size else size)
                if position > size:
                    break
        self.need(position - start, key)
        return StringArray(self.file, places + 8, np.append(places[1:], position)[:count])

    # -- tensors ---------------------------------------------------------------------------------------------------

    def tensor_entry(self) -> tuple[str, tuple[int, ...], str, int]:
        """One row of the tensor table: name, row-major shape, format, offset."""
        name = self.string("a tensor name")
        if not name:
            raise self.file.error("tensor name is empty")
        n_dims = self.number("I", f"n_dims of {name}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.file.error(f"number of dimensions of tensor {name}", n_dims, f"1 to {MAX_DIMS}")
        shape = tuple(self.number("Q", f"shape of {name}") for _ in range(n_dims))[::-1]
        kind = self.number("I", f"type of {name}")
        offset = self.number("Q", f"offset of {name}")
        if 0 in shape:
            raise self.file.error(f"shape of tensor {name}", list(shape), "dimensions of at least 1")
        if kind not in TENSOR_TYPES:
            raise self.file.error(f"type of tensor {name}", kind, f"a tensor type from 0 to {max(TENSOR_TYPES)}")
        if TENSOR_TYPES[kind] not in FORMATS:
            kind_name = TENSOR_TYPES[kind]
            raise UnsupportedError(
                f"{self.file.path}: tensor {name} has a format that is not implemented", found=kind_name,
                expected="one of " + " ".join(FORMATS),
            )  # fmt: skip
        return name, shape, TENSOR_TYPES[kind], offset

    def place(self, table: list[tuple[str, tuple[int, ...], str, int]]) -> dict[str, Weight]:
        """Find every tensor's bytes: inside the file, aligned, and no two on the same bytes."""
        start = _padded(self.position, self.alignment)
        tensors: dict[str, Weight] = {}
        end = start
        for name, shape, format_name, offset in sorted(table, key=lambda entry: entry[3]):
            form = FORMATS[format_name]
            if name in tensors:
                raise self.file.error(f"tensor {name} comes twice")
            if shape[-1] % form.group:
                raise self.file.error(f"row of {form.name} tensor {name}", shape[-1], f"a multiple of {form.group}")
            if offset % self.alignment or start + offset < end:
                problem = "lies over another tensor" if start + offset < end else "is not aligned"
                raise self.file.error(f"tensor {name} {problem}", found=f"offset {offset}")
            rows, row_bytes = math.prod(shape[:-1]), form.row_bytes(shape[-1])
            begin, end = start + offset, start + offset + rows * row_bytes
            if end > self.file.size:
                raise self.file.error(f"tensor {name} lies past the end of the file (cut download?)",
                                      f"{self.file.size} bytes", f"at least {end} bytes")  # fmt: skip
            data = self.file.array[begin:end].reshape(rows, row_bytes)
            tensors[name] = Weight(name, form.name, shape, data)
        if tensors and self.file.size > _padded(end, self.alignment):
            raise self.file.error("bytes after the last tensor", f"{self.file.size} bytes", f"{end} bytes")
        return tensors


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
