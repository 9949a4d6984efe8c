"""files/gguf.py: values, lazy string arrays, alignment, and models in several parts."""

import random

import numpy as np
import pytest
from gguf_file import gguf_bytes, string

from cutaway.errors import FormatError, NotFoundError
from cutaway.files.gguf import StringArray, read_gguf
from cutaway.quant import Weight


def tensor(rows, columns, fill=0.0):
    data = np.full((rows, columns), fill, np.float32)
    return Weight("", "F32", (rows, columns), data.view(np.uint8))


def write(path, metadata, weights=None, **more):
    path.write_bytes(gguf_bytes(metadata, weights, **more))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_metadata(tmp_path, version):
    values = {"a": 1, "b": 2.5, "c": True, "d": "täxt", "e": ["x", "", "你"], "f": [1, 2], "g": [True, False], "h": []}
    file = read_gguf(write(tmp_path / "x.gguf", values, version=version))
    read = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in file.metadata.items()}
    assert {k: list(v) if isinstance(v, StringArray) else v for k, v in read.items()} == values
    assert file.files == (tmp_path / "x.gguf",)


def test_a_string_array_is_a_sequence(tmp_path):
    words = read_gguf(write(tmp_path / "x.gguf", {"w": [f"w{i}" for i in range(1000)], "after": 7})).metadata["w"]
    assert len(words) == 1000
    assert (words[0], words[-1], words[2:4]) == ("w0", "w999", ["w2", "w3"])
    assert "w500" in words
    with pytest.raises(IndexError):
        words[1000]


# Lengths are found by the zeros after them: strings that are long, empty or full of zeros must not lead astray.
ODD = ["", "\0", "\0" * 9, "a" + "\0" * 7, "\1\0\0\0\0\0\0\0", "x" * 255, "x" * 256, "x" * 257, "y" * 70_000, "b\0"]


@pytest.mark.parametrize("seed", range(20))
def test_any_strings_are_stepped_over(tmp_path, seed):
    pick = random.Random(seed)
    plain = [f"w{i}" * pick.randrange(1, 9) for i in range(20)]
    words = [pick.choice(ODD if pick.random() < seed / 20 else plain) for _ in range(pick.randrange(300))]
    metadata = read_gguf(write(tmp_path / "x.gguf", {"w": words, "v": ["z"], "after": 7})).metadata
    assert list(metadata["w"]) == words
    assert (list(metadata["v"]), metadata["after"]) == (["z"], 7)


def test_a_string_array_that_is_cut_short(tmp_path):
    whole = write(tmp_path / "x.gguf", {"w": ["ab", "x" * 300, "", "cd"] * 50}).read_bytes()
    end = whole.rindex(b"cd") + 2
    for cut in (1, 9, 12, 20, 400):
        (tmp_path / "x.gguf").write_bytes(whole[: end - cut])
        with pytest.raises(FormatError, match="past the end"):
            read_gguf(tmp_path / "x.gguf")


def test_a_string_array_that_is_not_utf8_is_an_error_that_names_the_string(tmp_path):
    path = write(tmp_path / "x.gguf", {"w": ["ok", "??"]})
    path.write_bytes(path.read_bytes().replace(string("??"), string(b"\xff\xfe")))
    words = read_gguf(path).metadata["w"]
    with pytest.raises(FormatError, match=r"x\.gguf: string 1 of an array is not UTF-8"):
        list(words)


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment(tmp_path, alignment):
    weights = {"a": tensor(1, 3, 1.0), "b": tensor(2, 5, 2.0)}
    path = write(tmp_path / "x.gguf", {"general.alignment": alignment}, weights, alignment=alignment)
    tensors = read_gguf(path).tensors
    assert tensors["a"].dequantize().tolist() == [[1.0] * 3]
    assert tensors["b"].dequantize().tolist() == [[2.0] * 5] * 2


def test_weights_are_read_only_views_of_the_file(tmp_path):
    data = read_gguf(write(tmp_path / "x.gguf", {}, {"a": tensor(4, 8)})).tensors["a"].data
    assert data.shape == (4, 32)
    assert not data.flags.owndata
    assert not data.flags.writeable


def test_dimensions_turn_round(tmp_path):
    vector = Weight("", "F32", (6,), np.arange(6, dtype=np.float32).view(np.uint8))
    tensors = read_gguf(write(tmp_path / "x.gguf", {}, {"v": vector, "m": tensor(2, 3)})).tensors
    assert (tensors["v"].shape, tensors["v"].data.shape) == ((6,), (1, 24))
    assert tensors["m"].shape == (2, 3)


# -- several parts -----------------------------------------------------------------------------------------------------


def split(folder, count=3, **changes):
    """A model of `count` tensors, one to a part; `changes` replace `split.*` keys as `{part: {key: value}}`."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        keys = {"split.no": i, "split.count": count, "split.tensors.count": count}
        keys |= {"general.name": "first"} if i == 0 else {}
        keys |= changes.get(f"part{i}", {})
        write(path, keys, {f"t{i}": tensor(1, 4, i)})
    return paths


def test_any_part_opens_the_whole_model(tmp_path):
    paths = split(tmp_path)
    for path in paths:
        file = read_gguf(path)
        assert file.files == tuple(paths)
        assert file.metadata["general.name"] == "first"
        assert {n: t.dequantize()[0, 0] for n, t in file.tensors.items()} == {"t0": 0.0, "t1": 1.0, "t2": 2.0}


def test_a_missing_part_is_named(tmp_path):
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(NotFoundError, match=r"all 3 parts.*1 missing \(m-00002-of-00003\.gguf\)"):
        read_gguf(paths[0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"part2": {"split.no": 1}}, "m-00003-of-00003.gguf: is not the part its name says: found split.no 1 of 3"),
        ({"part1": {"split.count": 4}}, "m-00002-of-00003.gguf: is not the part its name says"),
        ({"part0": {"split.tensors.count": 4}}, "parts do not add up: found 3, expected 4 tensors"),
        ({"part0": {"split.count": 4}}, "a name that ends in -00001-of-00004.gguf"),
        ({"part0": {"split.count": 2**31}}, "its name does not say so"),
        ({"part0": {"split.count": "3"}}, "split.count"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, changes, match):
    paths = split(tmp_path, **changes)
    with pytest.raises(FormatError, match=match):
        read_gguf(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    paths = split(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes().replace(string("t2"), string("t0")))
    with pytest.raises(FormatError, match="tensor t0 is in an earlier part already"):
        read_gguf(paths[1])


def test_a_part_that_was_renamed_is_refused(tmp_path):
    path = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match="one part of a split model"):
        read_gguf(path)
