"""Damaged and hostile files: each refused with a named error, in under a second and under 50 MB."""

import json
import struct
import time
import tracemalloc
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from gguf_file import ARRAY, F32, STRING, U32, U64, entry, gguf_bytes, header, model_bytes, string, value
from tiny import TINY, random_weights

from cutaway.errors import CutawayError, FormatError, LoadError, UnsupportedError
from cutaway.files.checkpoint import load
from cutaway.files.gguf import read_gguf
from cutaway.files.safetensors import read_safetensors
from cutaway.forward.decoder import decoder


@contextmanager
def refused(*words, kind=LoadError):
    """The block must raise `kind` with all `words` in its one line, quickly and without much memory."""
    tracemalloc.start()
    start = time.process_time()  # not the clock on the wall: other work on the machine must not count
    try:
        with pytest.raises(kind) as caught:
            yield
        seconds = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, CutawayError)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line
    assert seconds < 1
    assert peak < 50e6


def kv(key, data):
    return string(key) + data


def array(kind, count, data=b""):
    return struct.pack("<IIQ", ARRAY, kind, count) + data


def u32(number):
    return struct.pack("<II", U32, number)


def one_tensor(dims, kind=0, offset=0, n_dims=None, name="t", data=bytes(64)):
    head = header(1, 0) + entry(name, dims, kind, offset, n_dims)
    return head + bytes(-len(head) % 32) + data


def aligned_to(alignment):
    return header(0, 1) + kv("general.alignment", alignment)


nested = array(ARRAY, 1) + struct.pack("<IQ", ARRAY, 1) * 9_999 + struct.pack("<IQ", U32, 0)

HOSTILE_GGUF = {
    "tensor count": (header(2**60, 0), ["tensor count", str(2**60)]),
    "metadata count": (header(0, 2**60), ["metadata count"]),
    "key length": (header(0, 1) + struct.pack("<Q", 2**40) + b"key" * 9, ["key", "past the end", str(2**40)]),
    "string length": (header(0, 1) + kv("k", struct.pack("<IQ", STRING, 2**63)), ["k", "past the end"]),
    "string array": (header(0, 1) + kv("k", array(STRING, 2**50)), ["length of k", str(2**50)]),
    "number array": (header(0, 1) + kv("k", array(U64, 2**61)), ["length of k", str(2**61)]),
    "string in array": (header(0, 1) + kv("k", array(STRING, 2, struct.pack("<QQ", 2**64 - 8, 0))), ["k", "past the"]),
    "cut string array": (header(0, 1) + kv("k", array(STRING, 2, string("abcdefgh"))), ["k", "past the end"]),
    "nested arrays": (header(0, 1) + kv("k", nested), ["k is an array of arrays"]),
    "array element type": (header(0, 1) + kv("k", array(77, 1)), ["element type of k", "77"]),
    "value type": (header(0, 1) + kv("k", struct.pack("<II", 13, 0)), ["type of k", "13"]),
    "many keys": (header(0, 70_000) + b"".join(kv(f"k{i}", u32(1)) for i in range(70_000)), ["at most 65536"]),
    "empty key": (header(0, 1) + kv("", u32(1)), ["key is empty"]),
    "key twice": (header(0, 2) + kv("key", u32(1)) * 2, ["key key comes twice"]),
    "key not UTF-8": (header(0, 1) + kv(b"\xff\xfe", u32(1)), ["UTF-8"]),
    "text not UTF-8": (header(0, 1) + kv("k", struct.pack("<I", STRING) + string(b"\xc3")), ["k is not UTF-8"]),
    "zero dimension": (one_tensor([0, 8]), ["shape of tensor t", "[8, 0]"]),
    "zero second dimension": (one_tensor([8, 0]), ["shape of tensor t"]),
    "huge dimension": (one_tensor([2**63, 4]), ["tensor t", "past the end"]),
    "huge dimensions": (one_tensor([2**63, 2**63, 2**63, 2**63]), ["tensor t", "past the end"]),
    "nine dimensions": (one_tensor([1] * 9), ["dimensions of tensor t", "found 9"]),
    "no dimension": (one_tensor([]), ["dimensions of tensor t", "found 0"]),
    "n_dims past the end": (one_tensor([], n_dims=2**32 - 1), ["dimensions of tensor t"]),
    "type id 999": (one_tensor([4, 4], kind=999), ["type of tensor t", "999"]),
    "row of part of a group": (one_tensor([33, 1], kind=8), ["tensor t", "33", "multiple of 32"]),
    "data offset": (one_tensor([4, 4], offset=2**62), ["tensor t", "past the end"]),
    "data offset near 2**64": (one_tensor([4, 4], offset=2**64 - 32), ["tensor t", "past the end"]),
    "data offset askew": (one_tensor([4, 4], offset=4), ["tensor t is not aligned"]),
    "cut data": (one_tensor([4, 4], data=bytes(63)), ["tensor t", "at least", "cut download"]),
    "bytes after the data": (one_tensor([4, 4]) + bytes(32), ["bytes after the last tensor"]),
    "alignment 0": (aligned_to(u32(0)), ["general.alignment", "found 0"]),
    "alignment 3": (aligned_to(u32(3)), ["general.alignment", "found 3"]),
    "alignment 48": (aligned_to(u32(48)), ["general.alignment", "found 48"]),
    "alignment 2**30": (aligned_to(u32(2**30)), ["general.alignment", str(2**30)]),
    "alignment a text": (aligned_to(value("32")), ["general.alignment", "'32'"]),
    "alignment a float": (aligned_to(struct.pack("<If", F32, 32)), ["general.alignment", "32.0"]),
    "empty tensor name": (one_tensor([4, 4], name=""), ["tensor name is empty"]),
    "magic GGML": (header(0, 0, magic=b"GGML"), ["is not a GGUF file", "older than GGUF"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
    "version 1": (header(0, 0, version=1), ["version", "found 1"]),
    "version 99": (header(0, 0, version=99), ["version", "found 99"]),
    "header cut": (header(0, 0)[:19], ["metadata count", "past the end"]),
    "magic only": (b"GGUF", ["version", "past the end"]),
}


@pytest.mark.parametrize("fault", sorted(HOSTILE_GGUF))
def test_hostile_gguf(tmp_path, fault):
    data, words = HOSTILE_GGUF[fault]
    assert len(data) < {"nested arrays": 130_000, "many keys": 2_000_000}.get(fault, 400)
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with refused("x.gguf", *words):
        read_gguf(path)
    with refused("x.gguf", *words):
        load(path)


@pytest.mark.parametrize("left", range(24))
def test_a_string_array_that_ends_where_the_file_does(tmp_path, left):
    """Whatever the number of bytes after the last length that could be read."""
    for strings in (1, 2, 3, 300):
        data = header(0, 1) + kv("k", array(STRING, strings + 1, string("abc") * strings + bytes(left)))
        (tmp_path / "x.gguf").write_bytes(data)
        if left >= 8:
            assert list(read_gguf(tmp_path / "x.gguf").metadata["k"]) == ["abc"] * strings + [""]
        else:
            with refused("x.gguf", kind=FormatError):
                read_gguf(tmp_path / "x.gguf")


GGUF_SETTINGS = {
    "rope base below 1": ({"qwen2.rope.freq_base": 0.5}, ["rope base", "0.5"]),
    "rope base NaN": ({"qwen2.rope.freq_base": float("nan")}, ["rope.freq_base", "nan"]),
    "rope base infinite": ({"qwen2.rope.freq_base": float("inf")}, ["rope.freq_base", "inf"]),
    "yarn with base 1": (
        {"qwen2.rope.freq_base": 1.0, "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0},
        ["rope base"],
    ),
    "yarn past all contexts": (
        {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 1e11},
        ["context", "2**31"],
    ),
    "linear factor 0": (
        {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 1e-20},
        ["rope scaling factor"],
    ),
    "heads of 2**31": ({"qwen2.attention.head_count": 2**31}, ["attention.head_count", str(2**31)]),
    "layers of 2**31 - 1": ({"qwen2.block_count": 2**31 - 1}, ["tensor blk.2.attn_norm.weight is missing"]),
    "widths whose product is 2**60": (
        {"qwen2.attention.head_count": 2**30, "qwen2.attention.key_length": 2**30},
        ["attention.value_length"],
    ),
    "a list for a number": ({"qwen2.embedding_length": [64, 64]}, ["embedding_length"]),
    "a text for a number": ({"qwen2.embedding_length": "64"}, ["embedding_length", "'64'"]),
}


@pytest.mark.parametrize("fault", sorted(GGUF_SETTINGS))
def test_hostile_settings_in_gguf(tmp_path, fault):
    change, words = GGUF_SETTINGS[fault]
    path = tmp_path / "x.gguf"
    weights = random_weights(decoder(TINY))
    path.write_bytes(model_bytes(TINY, weights))
    load(path)
    path.write_bytes(model_bytes(TINY, weights, **change))
    with refused("x.gguf", *words):
        load(path)


def test_the_same_tensor_twice_and_tensors_over_each_other(tmp_path):
    path = tmp_path / "x.gguf"
    for names, offsets, words in (
        (("t", "t"), (0, 64), "tensor t comes twice"),
        (("t", "u"), (0, 32), "over another tensor"),
        (("t", "u"), (0, 0), "over another tensor"),
    ):
        head = header(2, 0) + b"".join(entry(n, [4, 4], 0, o) for n, o in zip(names, offsets, strict=True))
        path.write_bytes(head + bytes(-len(head) % 32 + 128))
        with refused(words, kind=FormatError):
            read_gguf(path)


def test_tensor_formats_that_are_not_implemented_are_named(tmp_path):
    for kind, name in ((16, "IQ2_XXS"), (23, "IQ4_XS"), (24, "I8"), (34, "TQ1_0"), (39, "MXFP4"), (9, "Q8_1")):
        (tmp_path / "x.gguf").write_bytes(one_tensor([256, 1], kind=kind, data=bytes(2048)))
        with refused("tensor t", name, kind=UnsupportedError):
            read_gguf(tmp_path / "x.gguf")


# -- files that are no models ------------------------------------------------------------------------------------------


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def two(a, b, size=128):
    """Two F32 [4, 4] tensors at these offsets."""
    table = {name: {"dtype": "F32", "shape": [4, 4], "data_offsets": o} for name, o in (("a", a), ("b", b))}
    return safetensors_bytes(table, bytes(size))


def one(size=64, **fields):
    return safetensors_bytes({"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **fields}}, bytes(size))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 988097824\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>503</title></head></html>"

BAD_SAFETENSORS = {
    "empty": (b"", ["is empty"]),
    "LFS pointer": (LFS, ["looks like a Git LFS pointer"]),
    "HTML page": (HTML, ["looks like an HTML page"]),
    "seven bytes": (b"\x08" + bytes(6), ["too short", "7 bytes"]),
    "a GGUF file": (gguf_bytes({}), ["looks like a GGUF file"]),
    "a pickle": (b"PK\x03\x04" + bytes(60), ["never opened"]),
    "cut by one byte": (two([0, 64], [64, 128])[:-1], ["found", "bytes", "cut download"]),
    "cut to half": (two([0, 64], [64, 128])[:150], ["cut download"]),
    "cut in the header": (two([0, 64], [64, 128])[:50], ["length of the header"]),
    "header of 2**40": (struct.pack("<Q", 2**40) + b'{"a": 1}', ["length of the header", str(2**40)]),
    "header of 2**64 - 1": (struct.pack("<Q", 2**64 - 1) + b"{}", ["length of the header"]),
    "past the end": (two([0, 64], [64, 128], 100), ["cut download", "found"]),
    "far past the end": (one(shape=[2**31, 2**30], data_offsets=[0, 2**63]), ["tensor a"]),
    "overlapping": (two([0, 64], [32, 96]), ["tensor b lies over another"]),
    "with a hole": (two([0, 64], [96, 160], 160), ["tensor b leaves bytes unused"]),
    "begin after end": (two([64, 0], [64, 128]), ["data_offsets of tensor a", "64 to 0"]),
    "trailing bytes": (two([0, 64], [64, 128], 144), ["expected", "found"]),
    "shape and size differ": (one(shape=[4, 5]), ["data_offsets of tensor a", "80 bytes"]),
    "negative shape": (one(shape=[-4, -4]), ["tensor a", "whole numbers"]),
    "shape of floats": (one(shape=[4.0, 4]), ["tensor a"]),
    "shape of many": (one(shape=[1] * 100_000), ["tensor a"]),
    "offsets of three": (one(data_offsets=[0, 64, 64]), ["tensor a"]),
    "unknown dtype": (one(dtype="F4"), ["dtype of tensor a", "F4"]),
    "dtype a list": (one(dtype=["F32"]), ["dtype of tensor a"]),
    "entry a number": (safetensors_bytes({"a": 5}), ["tensor a"]),
    "header a list": (safetensors_bytes(b"{]" + b" " * 30), ["JSON"]),
    "header not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), ["JSON"]),
    "the same name twice": (
        safetensors_bytes(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', bytes(4)),
        ["'a' twice"],
    ),
    "header of many lists": (safetensors_bytes(b'{"a":[' + b"[]," * 600_000 + b"[]]}"), ["objects and items"]),
    "header nested": (safetensors_bytes(b'{"a":' + b"[" * 100_000), ["JSON"]),
    "header a long number": (safetensors_bytes(b'{"a":' + b"9" * 100_000 + b"}"), ["JSON"]),
}


@pytest.mark.parametrize("fault", sorted(BAD_SAFETENSORS))
def test_bad_safetensors(tmp_path, fault):
    data, words = BAD_SAFETENSORS[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with refused("model.safetensors", *words):
        read_safetensors(path)
    with refused("model.safetensors", *words):
        load(tmp_path)
    same_as_gguf = tmp_path / "x.gguf"
    same_as_gguf.write_bytes(data)
    if fault != "a GGUF file":
        with refused("x.gguf"):
            load(same_as_gguf)


def test_a_disguise_is_named_for_gguf_too(tmp_path):
    path = tmp_path / "x.gguf"
    for data, words in ((LFS, "Git LFS pointer"), (HTML, "HTML page"), (one(), "safetensors"), (b"", "is empty")):
        path.write_bytes(data)
        with refused("x.gguf", words):
            load(path)


def test_a_gguf_model_cut_anywhere_is_refused(tmp_path):
    weights = random_weights(decoder(TINY))
    data = model_bytes(TINY, weights)
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert load(path).config.hidden == 64
    for size in [*range(0, 1200, 7), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with refused("x.gguf"):
            load(path)


def test_a_gguf_model_with_any_byte_of_its_head_changed_is_refused_or_loads(tmp_path):
    """No change may end in another exception than ours."""
    data = bytearray(model_bytes(TINY, random_weights(decoder(TINY)), tokenizer__ggml__tokens=["a", "b"]))
    head = data.index(b"output_norm.weight") + 40
    rng = np.random.default_rng(0)
    path = tmp_path / "x.gguf"
    for position in rng.integers(0, head, 400):
        changed = data.copy()
        changed[position] = rng.integers(0, 256)
        path.write_bytes(changed)
        with suppress(LoadError):
            list(load(path).vocabulary.tokens)


# -- config.json -------------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"[" * 100_000, ["config.json", "JSON"]),
        (b"[]", ["config.json", "an object"]),
        (b"\xff", ["config.json", "UTF-8"]),
        (b"", ["config.json", "JSON"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": 2**40}, ["hidden_size", str(2**40)]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"num_hidden_layers": 2**31 - 1}, ["tensor model.embed_tokens.weight is missing"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "found 0"]),
        ({"num_key_value_heads": 3}, ["multiple of key/value heads", "4 and 3"]),
        ({"head_dim": 15}, ["head dimension", "15", "even"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"rms_norm_eps": 1e400}, ["rms_norm_eps", "inf"]),
        ({"rope_theta": -1}, ["rope_theta"]),
        ({"rope_theta": 0.5}, ["rope base", "0.5"]),
        ({"rope_theta": float("nan")}, ["rope_theta", "nan"]),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, ["rope base", "found 1"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.1}}, ["rope base", "0.1"]),
        ({"rope_scaling": {"type": "yarn", "factor": 1e11}}, ["context", "2**31"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": 5e-324}}, ["beta_slow"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e-20}}, ["rope scaling factor", "1e-20"]),
        ({"rms_norm_eps": 1e-310}, ["rms_norm_eps", "1e-310"]),
        ({"layer_types": []}, ["layer_types", "2 kinds"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 kinds"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["full_attention", [[]] * 99]}, ["layer_types", "..."]),
        ({"layer_types": {"0": "full_attention"}}, ["layer_types"]),
        ({"hidden_size": 10**4000}, ["hidden_size", "..."]),
        ({"eos_token_id": 10**4000}, ["eos_token_id", "..."]),
        ({"eos_token_id": [1, 2.5]}, ["eos_token_id", "2.5"]),
        ({"hidden_size": 2**30, "num_attention_heads": 2**30, "head_dim": 2**30}, ["tensor"]),
        (b'{"a": ' + b"[" * 200_000, ["config.json", "JSON"]),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", ["config.json", "nests too deeply"]),
        (b'{"a": ' * 40 + b"1" + b"}" * 40, ["config.json", "nests too deeply"]),
        (b'{"a": [' + b"[]," * 600_000 + b"[]]}", ["config.json", "objects and items"]),
        (b'{"hidden_size": 64, "hidden_size": 128}', ["config.json", "'hidden_size' twice"]),
        (b'{"a": {"b": 1, "b": 1}}', ["config.json", "'b' twice"]),
        ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, ["factor", "1e+308"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "an object"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"model_type": ["qwen2"]}, ["model_type", "a text"]),
    ],
)
def test_hostile_config(tmp_path, change, words):
    empty = safetensors_bytes({})
    (tmp_path / "model.safetensors").write_bytes(empty)
    data = change if isinstance(change, bytes) else json.dumps({**CONFIG, **change}).encode()
    (tmp_path / "config.json").write_bytes(data)
    with refused(*words):
        load(tmp_path)
