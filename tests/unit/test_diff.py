"""diff: two runs tap by tap, and the names Hugging Face gives the same tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny
from fake_llm import FakeLLM

from cutaway.errors import FormatError, NotFoundError, RequestError
from cutaway.experiments.diff import DEFAULT_TAPS, diff, diff_models, diff_tensors, record
from cutaway.experiments.tensors import from_hugging_face, hugging_face_names, load_tensors, save_tensors

PROMPT = "Hello, world"


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


def test_one_tensor_by_hand() -> None:
    a = np.array([[3.0, 4.0], [0.0, 2.0]], dtype=np.float32)
    b = np.array([[3.0, 4.0], [0.0, 2.5]], dtype=np.float32)
    found = diff_tensors("x", a, b, 0.1)
    assert found.relative == pytest.approx(0.5 / math.sqrt(29))
    assert (found.max_abs, found.worst_row, found.worst_relative) == (0.5, 1, 0.25)
    assert found.cosine == pytest.approx((25 + 5) / math.sqrt(29 * 31.25))
    assert not found.departs
    assert not found.equal_bits
    assert diff_tensors("x", a, b, 0.05).departs


def test_equal_and_not_comparable() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 3, 7))
    assert all(diff_tensors("x", row, row, 0.0).cosine <= 1 for row in rows)  # rounding would exceed it
    a = np.ones((2, 3), dtype=np.float32)
    same = diff_tensors("x", a, a.copy(), 0.0)
    assert (same.relative, same.max_abs, same.worst_row, same.departs, same.equal_bits) == (0.0, 0.0, None, False, True)
    shapes = diff_tensors("x", a, np.ones((3, 3), dtype=np.float32), 1.0)
    assert shapes.departs
    assert shapes.relative == math.inf
    bad = a.copy()
    bad[1, 2] = np.nan
    broken = diff_tensors("x", a, bad, 1.0)
    assert (broken.departs, broken.nans, broken.worst_row) == (True, 1, 1)
    zero = diff_tensors("x", np.zeros((1, 2)), np.full((1, 2), 1e-9), 1.0)
    assert zero.relative == math.inf
    negative_zero = diff_tensors("x", np.zeros((1, 2)), np.full((1, 2), -0.0), 0.0)
    assert not negative_zero.departs
    assert not negative_zero.equal_bits


def test_first_tap_that_departs(llm: FakeLLM) -> None:
    ids = llm.tokenize(PROMPT)
    a = record(llm, ids, ["*"])
    b = {name: value.copy() for name, value in a.items()}
    b["layers.1.mlp.up"][3] += 1.0
    b["logits"] += 1.0
    found = diff(llm.program, a, b, tolerance=1e-3)
    assert [tap.name for tap in found.taps] == llm.program.names
    assert found.first is not None
    assert (found.first.name, found.first.worst_row) == ("layers.1.mlp.up", 3)
    assert found.first_bit is found.first
    assert diff(llm.program, a, a).first is None
    assert [tap.name for tap in found.taps if tap.departs] == ["layers.1.mlp.up", "logits"]


def test_what_only_one_side_has(llm: FakeLLM) -> None:
    x = np.ones((1, 1))
    found = diff(llm.program, {"embed": x, "logits": x, "other": x}, {"embed": x, "final_norm": x})
    assert (found.only_a, found.only_b) == (("logits", "other"), ("final_norm",))
    with pytest.raises(RequestError, match="no tensor in common: found embed against logits"):
        diff(llm.program, {"embed": x}, {"logits": x})


def test_two_models(llm: FakeLLM) -> None:
    quantised = FakeLLM(format="Q8_0", name="tiny q8_0")  # the same random values, rounded
    found = diff_models(llm, quantised, PROMPT, tolerance=1e-6)
    assert (found.label_a, found.label_b) == ("tiny", "tiny q8_0")
    assert found.first is not None
    assert found.first.name == "embed"
    assert 1e-4 < found.taps[-1].relative < 0.2
    assert diff_models(llm, FakeLLM(), PROMPT, tolerance=0.0).first_bit is None
    other = FakeLLM()
    other.tokenize = lambda text: [1, 2]  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="different tokens"):
        diff_models(llm, other, PROMPT)


def test_default_taps_are_names_of_every_variant() -> None:
    for config in tiny.VARIANTS.values():
        llm = FakeLLM(config)
        assert len(record(llm, [1, 2, 3], DEFAULT_TAPS)) == 2 * config.num_layers + 3


# -- names and files -------------------------------------------------------------------------------------------------


def test_hugging_face_names(llm: FakeLLM) -> None:
    names = hugging_face_names(llm.program)
    assert names["embed"] == "hidden_states.0"
    assert names["layers.0.residual"] == "hidden_states.1"
    assert names["layers.1.residual"] == "model.layers.1"  # the last residual has no hidden state
    assert names["final_norm"] == "hidden_states.2"
    assert names["layers.0.attn.k"] == "model.layers.0.self_attn.k_proj"
    assert names["logits"] == "logits"


def test_from_hugging_face(llm: FakeLLM) -> None:
    x = np.ones((1, 4, 64))
    renamed, left_over = from_hugging_face(
        {
            "hidden_states.0": x,
            "hidden_states[1]": x,
            "hidden_state_2": x,
            "model.layers.1": x,
            "model.layers.0.mlp.up_proj.output": x,
            "lm_head": x,
            "layers.0.attn.q_rope": x[0],
            "hidden_states.3": x,
            "past": x,
        },
        llm.program,
    )
    layers = ["layers.0.residual", "layers.1.residual", "layers.0.mlp.up", "layers.0.attn.q_rope"]
    assert sorted(renamed) == sorted(["embed", "final_norm", "logits", *layers])
    assert left_over == ("hidden_states.3", "past")
    assert all(value.shape == (4, 64) for value in renamed.values())


def test_tensor_files(tmp_path: Path) -> None:
    tensors = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "layers.0.residual": np.float16([[1, 2]])}
    for suffix in (".npz", ".safetensors"):
        found = load_tensors(save_tensors(tmp_path / f"t{suffix}", tensors))
        assert set(found) == set(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(found[name], value)
            assert found[name].dtype == value.dtype


def test_tensor_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load_tensors(tmp_path / "none.npz")
    with pytest.raises(RequestError):
        load_tensors(tmp_path / "t.pt")
    for suffix in (".npz", ".safetensors"):
        (tmp_path / f"bad{suffix}").write_bytes(b"\xff" * 64)
        with pytest.raises(FormatError):
            load_tensors(tmp_path / f"bad{suffix}")
    np.savez(tmp_path / "pickle.npz", x=np.array([{}], dtype=object))
    with pytest.raises(FormatError):
        load_tensors(tmp_path / "pickle.npz")
