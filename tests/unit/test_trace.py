"""trace, lens, attention, the table: each on a tiny model, against the same thing worked out another way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fake_llm import FakeLLM

from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments import lens as lens_room
from cutaway.experiments.attention import attention_weights
from cutaway.experiments.distributions import log_softmax
from cutaway.experiments.lens import Lens, lens, lens_logits, residual_states
from cutaway.experiments.passes import traced_pass
from cutaway.experiments.table import operation_table
from cutaway.experiments.tensors import load_tensors
from cutaway.experiments.trace import statistics, trace
from cutaway.forward.reference import rms_norm

PROMPT = "Hello, world"


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


# -- the table -------------------------------------------------------------------------------------------------------


def test_table_has_a_row_an_operation(llm: FakeLLM) -> None:
    rows = trace(llm, PROMPT, lens_positions=None).table
    assert [row.name for row in rows] == llm.program.names
    by_name = {row.name: row for row in rows}
    q = by_name["layers.1.attn.q"]
    assert q.module == "model.layers.1.self_attn.q_proj"
    assert q.input_shapes == ((12, 64),)
    assert q.output_shape == (12, 64)
    assert q.weight_bytes == 64 * 64 * 4 + 64 * 4  # matrix and bias in F32
    assert q.flops == 2 * 12 * 64 * 64
    assert by_name["embed"].weight_bytes == 12 * 64 * 4  # only the rows looked up
    mix = by_name["layers.0.attn.mix"]
    assert mix.input_shapes == ((12, 64), (12, 32), (12, 32))
    assert mix.flops == 4 * (12 * 13 // 2) * 4 * 16
    assert mix.kv_bytes == (12 + 12) * 2 * 2 * 16 * 4  # written once, read once: k and v, 2 heads of 16 in F32
    assert by_name["logits"].output_shape == (12, 97)
    assert all(row.time_ns is None for row in rows)


def test_table_of_quantised_weights_counts_their_bytes() -> None:
    llm = FakeLLM(format="Q8_0")
    row = next(r for r in trace(llm, PROMPT, lens_positions=None).table if r.name == "layers.0.mlp.up")
    assert (row.dtype, row.weight_bytes) == ("Q8_0", 96 * 2 * 34)


def test_table_takes_times_of_fused_groups(llm: FakeLLM) -> None:
    profile = [(["layers.0.attn.q", "layers.0.attn.k"], 700), (["logits"], 50)]
    rows = operation_table(llm.program, {}, positions=range(4), num_outputs=1, profile=profile)
    timed = {row.name: row for row in rows if row.time_ns is not None}
    assert {name: row.time_ns for name, row in timed.items()} == {"layers.0.attn.k": 700, "logits": 50}
    assert timed["layers.0.attn.k"].fused == ("layers.0.attn.q", "layers.0.attn.k")
    assert timed["logits"].fused == ()


class Clocked:
    """An interpreter with a clock: each step of a run takes 10 ns for the embedding, 32 ns for the rest."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter, self.runs = interpreter, []

    def run(self, batch: Any, kv_cache: Any, taps: Any = None, *, profile: bool = False) -> np.ndarray:
        self.runs.append((taps is not None, profile))
        return self.interpreter.run(batch, kv_cache, taps)

    def times(self) -> list[tuple[tuple[str, ...], float]]:
        return [(("embed",), 10.0), (("final_norm", "logits"), 32.0), (("top_logits",), 5.0)]


def test_times_are_of_a_run_without_taps() -> None:
    llm = FakeLLM()
    clocked = llm.interpreter = llm.engine.interpreter = Clocked(llm.interpreter)
    found = trace(llm, PROMPT, lens_positions=None)
    assert clocked.runs == [(True, False), *[(False, True)] * 3]
    assert {row.name: row.time_ns for row in found.table if row.time_ns} == {"embed": 10, "logits": 32}
    assert found.table[-1].fused == ("final_norm", "logits")
    assert found.time_ns == 42
    assert llm.engine.interpreter is clocked
    llm.chunk = 5  # three steps
    assert trace(llm, PROMPT, lens_positions=None).time_ns == 3 * 42
    assert trace(llm, PROMPT, lens_positions=None, time=False).time_ns is None


# -- taps ------------------------------------------------------------------------------------------------------------


def test_statistics() -> None:
    found = statistics("x", np.array([[3.0, -4.0], [np.nan, 1.0]], dtype=np.float32))
    assert (found.mean, found.min, found.max, found.nans) == (0.0, -4.0, 3.0, 1)
    assert found.norm == pytest.approx(math.sqrt(26))
    assert found.std == pytest.approx(math.sqrt(26 / 3))
    assert math.isnan(statistics("x", np.array([[np.nan]])).mean)
    assert statistics("x", np.empty((0, 4))).nans == 0


def test_taps_are_kept_described_and_saved(llm: FakeLLM, tmp_path: Path) -> None:
    found = trace(llm, PROMPT, ["layers.*.mlp.down", "logits"], attention=[(1, 2), (1, 0)], attention_rows=[3, 11])
    assert [s.name for s in found.statistics] == ["layers.0.mlp.down", "layers.1.mlp.down", "logits"]
    logits, _ = traced_pass(llm, llm.tokenize(PROMPT))
    np.testing.assert_array_equal(found.tensors["logits"], logits)
    for suffix in (".npz", ".safetensors"):
        saved = load_tensors(found.save(tmp_path / f"trace{suffix}"))
        assert sorted(saved) == sorted(["token_ids", "layers.1.attn.weights", *(s.name for s in found.statistics)])
        np.testing.assert_array_equal(saved["logits"], logits)
        assert saved["token_ids"].tolist() == llm.tokenize(PROMPT)
        assert saved["layers.1.attn.weights"].shape == (2, 2, 12)
    with pytest.raises(RequestError, match=r"npz or \.safetensors"):
        found.save(tmp_path / "trace.pkl")


def test_residual_norms(llm: FakeLLM) -> None:
    found = trace(llm, PROMPT, lens_positions=None).residual
    halves = [f"layers.{i}.{name}" for i in (0, 1) for name in ("attn_residual", "residual")]
    assert found.states == ("embed", *halves)
    _, tensors = traced_pass(llm, llm.tokenize(PROMPT), ["layers.1.residual"])
    np.testing.assert_allclose(found.norms[-1], np.linalg.norm(tensors["layers.1.residual"], axis=1), rtol=1e-6)


def test_next_tokens_are_the_best_of_the_last_row(llm: FakeLLM) -> None:
    found = trace(llm, PROMPT, lens_positions=None, top=3)
    row = log_softmax(llm.forward(llm.tokenize(PROMPT))[-1])
    assert [c.id for c in found.next_tokens] == np.argsort(-row)[:3].tolist()
    assert [c.logprob for c in found.next_tokens] == pytest.approx(np.sort(row)[::-1][:3].tolist())
    assert found.next_tokens[0].text == llm.detokenize([found.next_tokens[0].id])


def test_patch_goes_through(llm: FakeLLM) -> None:
    patched = trace(llm, PROMPT, ["logits"], patch={"embed": lambda x: x[::-1]})
    assert not np.array_equal(patched.tensors["logits"], trace(llm, PROMPT, ["logits"]).tensors["logits"])


def test_an_error_in_a_traced_run_leaves_nothing_behind() -> None:
    llm = FakeLLM()
    before = llm.forward(llm.tokenize(PROMPT))

    def broken(tensor: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace(llm, PROMPT, patch={"layers.0.residual": broken})
    with pytest.raises(RequestError, match="wrong shape"):
        trace(llm, PROMPT, patch={"layers.0.residual": lambda x: x[:1]})
    assert llm.forward(llm.tokenize(PROMPT)).tobytes() == before.tobytes()


def test_trace_refuses(llm: FakeLLM) -> None:
    for arguments, message in (
        ({"tap": ["layers.7.attn.q"]}, "no tensor"),
        ({"attention": [(2, 0)]}, "no such layer: found 2, expected 0 to 1"),
        ({"attention": [(0, 4)]}, "no such head: found 4, expected 0 to 3"),
        ({"attention": [(0, 0)], "attention_rows": [12]}, "no such row: found 12"),
        ({"lens_positions": [12]}, "no such position: found 12, expected 0 to 11"),
    ):
        with pytest.raises(RequestError, match=message):
            trace(llm, PROMPT, **arguments)
    with pytest.raises(RequestError, match="empty"):
        trace(llm, "")
    with pytest.raises(ContextLengthError):
        trace(llm, "a" * 300)


# -- the lens --------------------------------------------------------------------------------------------------------


def test_last_state_of_the_lens_is_the_model(llm: FakeLLM) -> None:
    logits, tensors = traced_pass(llm, llm.tokenize(PROMPT), residual_states(llm.program))
    np.testing.assert_allclose(lens_logits(llm, tensors["layers.1.residual"]), logits, rtol=1e-5, atol=1e-5)


def test_lens_normalises_each_row_by_itself(llm: FakeLLM) -> None:
    # r and 10 r point the same way, so they say the same; [3, 4] becomes [0.8485, 1.1314] at any length.
    r = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    alone, both = (np.exp(log_softmax(lens_logits(llm, rows))) for rows in (r, np.concatenate([10 * r, r])))
    np.testing.assert_allclose(both[0], alone[0], atol=1e-5)
    np.testing.assert_allclose(both[1], alone[0], atol=1e-6)
    for length in (3.0, 30.0):
        found = rms_norm(np.array([[length, length / 3 * 4]]), np.ones(2), 1e-6)
        np.testing.assert_allclose(found, [[0.8485, 1.1314]], atol=1e-4)


def test_lens_of_early_layers_by_hand(llm: FakeLLM) -> None:
    found = trace(llm, PROMPT, lens_positions=[2, 11]).lens
    assert found is not None
    logits, tensors = traced_pass(llm, llm.tokenize(PROMPT), residual_states(llm.program))
    norm, head = (llm.checkpoint.weights[n].dequantize() for n in ("final_norm.weight", "embed.weight"))
    for state, name in enumerate(found.states):
        by_hand = log_softmax(rms_norm(tensors[name][[2, 11]], norm, 1e-6) @ head.T)
        np.testing.assert_allclose(found.logprobs[state, :, 0], by_hand.max(axis=1), atol=1e-4)
        assert found.ids[state, :, 0].tolist() == by_hand.argmax(axis=1).tolist()
        assert found.answers.tolist() == logits[[2, 11]].argmax(axis=1).tolist()
        for column, answer in enumerate(found.answers):
            assert found.answer_rank[state, column] == 1 + (by_hand[column] > by_hand[column, answer]).sum()
            assert found.answer_logprob[state, column] == pytest.approx(by_hand[column, answer], abs=1e-4)
    assert found.answer_rank[-1].tolist() == [1, 1]


def test_trace_in_chunks_is_the_trace(llm: FakeLLM) -> None:
    chunked = FakeLLM()
    chunked.chunk = 5
    whole, parts = (trace(model, PROMPT, ["logits"], lens_positions=12) for model in (llm, chunked))
    assert whole.lens is not None
    assert parts.lens is not None
    np.testing.assert_array_equal(parts.lens.ids, whole.lens.ids)
    np.testing.assert_allclose(parts.lens.answer_logprob, whole.lens.answer_logprob, atol=1e-4)
    np.testing.assert_allclose(parts.tensors["logits"], whole.tensors["logits"], atol=1e-4)


def test_lens_in_parts_is_the_lens(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors = traced_pass(llm, llm.tokenize(PROMPT), residual_states(llm.program))
    whole = lens(llm, tensors, range(12), [7] * 12)
    monkeypatch.setattr(lens_room, "_ROWS_AT_ONCE", 5)
    parts = lens(llm, tensors, range(12), [7] * 12)
    np.testing.assert_array_equal(parts.ids, whole.ids)
    np.testing.assert_allclose(parts.answer_logprob, whole.answer_logprob, atol=1e-5)
    assert parts.ids.shape == (5, 12, 5)


def test_lens_asks_about_another_token(llm: FakeLLM) -> None:
    found = trace(llm, PROMPT, lens_positions=1, answer=7).lens
    assert found is not None
    assert found.answers.tolist() == [7]
    row = log_softmax(llm.forward(llm.tokenize(PROMPT))[-1])
    assert found.answer_rank[-1, 0] == 1 + (row > row[7]).sum()


def test_first_and_settled() -> None:
    nothing = np.zeros((4, 3))
    rank = np.array([[2, 1, 3], [1, 1, 2], [4, 1, 2], [1, 1, 2]])
    found = Lens(tuple("abcd"), (0, 1, 2), np.zeros(3, int), nothing, nothing, rank, nothing, nothing)
    assert found.first == (1, 0, None)
    assert found.settled == (3, 0, None)


def test_number_of_states() -> None:
    llm = FakeLLM(tiny.VARIANTS["llama"])
    assert len(residual_states(llm.program)) == 2 * 2 + 1
    assert residual_states(llm.program, after_attention=False) == ["embed", "layers.0.residual", "layers.1.residual"]


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["qwen2-group-7", "qwen3", "llama-yarn-mscale"])
def test_attention_weights_give_the_mix(variant: str) -> None:
    llm = FakeLLM(tiny.VARIANTS[variant])
    config = llm.config
    _, tensors = traced_pass(llm, llm.tokenize(PROMPT), ["layers.1.attn.*"])
    found = trace(llm, PROMPT, attention=[(1, None)], lens_positions=None).attention[0]
    assert found.weights.shape == (config.num_heads, 12, 12)
    assert found.heads == tuple(range(config.num_heads))
    values = tensors["layers.1.attn.v"].reshape(12, config.num_kv_heads, config.head_dim)
    for head in range(config.num_heads):
        mixed = found.weights[head] @ values[:, head // config.group]
        kept = tensors["layers.1.attn.mix"].reshape(12, config.num_heads, config.head_dim)[:, head]
        np.testing.assert_allclose(mixed, kept, atol=1e-5)
    assert np.triu(found.weights, 1).max() == 0.0
    np.testing.assert_allclose(found.weights.sum(axis=-1), 1.0, rtol=1e-12)


def test_attention_of_some_heads_and_rows(llm: FakeLLM) -> None:
    whole = trace(llm, PROMPT, attention=[(0, None)], lens_positions=None).attention[0].weights
    some = trace(llm, PROMPT, attention=[(0, 3), (0, 1)], attention_rows=[11, 4], lens_positions=None).attention[0]
    assert (some.heads, some.rows) == ((3, 1), (11, 4))
    np.testing.assert_array_equal(some.weights, whole[[3, 1]][:, [11, 4]])


def test_attention_of_large_scores_does_not_overflow(llm: FakeLLM) -> None:
    q = np.full((3, 64), 1e4, dtype=np.float32)
    k = np.full((3, 32), 1e4, dtype=np.float32)
    np.testing.assert_allclose(attention_weights(llm.config, q, k, [0], [2])[0, 0], 1 / 3)
