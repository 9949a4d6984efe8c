"""Against the `gguf` package: every format decodes to the same bits, and files it writes are read back whole."""

import gguf
import numpy as np
import pytest

from cutaway.files.gguf import TENSOR_TYPES, read_gguf
from cutaway.quant import FORMATS, dequantize, quantize


def same_bits(a, b):
    return np.array_equal(a.view(np.uint8), np.ascontiguousarray(b, np.float32).view(np.uint8))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_groups_decode_to_the_same_bits(name):
    f = FORMATS[name]
    data = np.random.default_rng(0).integers(0, 256, (33, 5 * f.group_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are now and then NaN or infinite
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
        assert same_bits(dequantize(name, data), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("kind", ["normal", "ties", "tiny", "sparse"])
def test_values_are_quantised_to_the_same_bytes(name, kind):
    x = np.random.default_rng(1).normal(0, 1, (64, 256)).astype(np.float32)
    x = {"normal": x, "ties": np.round(x, 1), "tiny": x * np.float32(1e-5), "sparse": x * (np.abs(x) > 2)}[kind]
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    assert np.array_equal(quantize(name, x), expected.view(np.uint8).reshape(64, -1))


def test_tensor_types_have_the_same_ids():
    ours = {number: name for number, name in TENSOR_TYPES.items() if name in gguf.GGMLQuantizationType.__members__}
    assert set(FORMATS) <= set(ours.values())
    assert all(gguf.GGMLQuantizationType[name] == number for number, name in ours.items())
    assert {t.name for t in gguf.GGMLQuantizationType if t <= max(TENSOR_TYPES)} <= set(TENSOR_TYPES.values())


def test_a_file_it_writes_is_read_back(tmp_path):
    rng = np.random.default_rng(2)
    tensors = {
        "a.weight": rng.normal(0, 1, (3, 7)).astype(np.float32),
        "b": rng.normal(0, 1, 5).astype(np.float16),
        "c.weight": rng.normal(0, 1, (4, 64)).astype(np.float32),
    }
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("f", 0.1)
    writer.add_bool("flag", True)
    writer.add_int64("big", -(1 << 40))
    writer.add_array("words", ["a", "", "你好", "x" * 300])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_string("text", "zwei\nZeilen")
    for name, x in tensors.items():
        if name == "c.weight":
            q8 = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(tmp_path / "x.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["f"] == float(np.float32(0.1))
    assert file.metadata["flag"] is True
    assert file.metadata["big"] == -(1 << 40)
    assert list(file.metadata["words"]) == ["a", "", "你好", "x" * 300]
    assert file.metadata["numbers"].tolist() == [1, 2, 3]
    assert file.metadata["text"] == "zwei\nZeilen"
    assert {name: (t.format, t.shape) for name, t in file.tensors.items()} == {
        "a.weight": ("F32", (3, 7)),
        "b": ("F16", (5,)),
        "c.weight": ("Q8_0", (4, 64)),
    }
    assert np.array_equal(file.tensors["a.weight"].dequantize(), tensors["a.weight"])
    assert np.array_equal(file.tensors["b"].dequantize(), tensors["b"].astype(np.float32))
    assert np.abs(file.tensors["c.weight"].dequantize() - tensors["c.weight"]).max() < 0.02
