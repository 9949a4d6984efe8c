"""The experiments on a real LLM over a tiny model: both interpreters, the engine and its prefix cache included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cutaway.experiments.diff import diff_models
from cutaway.experiments.lens import lens_logits
from cutaway.experiments.passes import traced_pass
from cutaway.experiments.score import perplexity, score
from cutaway.experiments.trace import trace
from cutaway.llm import LLM

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 97, 70)]  # two full blocks and a part of one


@pytest.fixture(params=["reference", "native"])
def llm(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> LLM:
    if request.param == "native":
        pytest.importorskip("cutaway.forward.native", exc_type=ImportError)
    return LLM(tiny_folder("qwen2"), interpreter=request.param, max_context=256, activations="f32")


def test_a_trace_is_of_the_run_itself(llm: LLM) -> None:
    plain = llm.forward(IDS)
    found = trace(llm, IDS, ["logits", "layers.*.mlp.act"], attention=[(0, None)])
    assert found.tensors["logits"].tobytes() == plain.tobytes()
    assert found.tensors["layers.1.mlp.act"].shape == (70, 96)
    assert found.next_tokens[0].id == plain[-1].argmax()
    assert found.lens is not None
    assert found.lens.answer_rank[-1].tolist() == [1] * 8
    timed = [row for row in found.table if row.time_ns is not None]
    assert bool(timed) == hasattr(llm.interpreter, "times")
    if timed:  # every operation belongs to one timed group
        assert sorted(name for row in timed for name in (row.fused or (row.name,))) == sorted(llm.program.names)


def test_the_last_state_of_the_lens_is_the_models_own_logits(llm: LLM) -> None:
    logits, tensors = traced_pass(llm, IDS, ["layers.1.residual"])
    again = lens_logits(llm, tensors["layers.1.residual"])
    np.testing.assert_allclose(again, logits, atol=1e-5, rtol=1e-5)
    if hasattr(llm.interpreter, "times"):  # rows do not depend on their neighbours: the same bits
        assert again.tobytes() == logits.tobytes()


def test_an_error_in_a_traced_run_leaves_nothing_behind(llm: LLM) -> None:
    plain, said = llm.forward(IDS), llm.generate(IDS, max_tokens=6)
    free = llm.engine.pool.num_free

    def broken(tensor: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            trace(llm, IDS, ["*"], patch={"layers.1.mlp.down": broken})
        with pytest.raises(ZeroDivisionError), llm.tap([], patch={"layers.0.residual": broken}):
            llm.generate(IDS, max_tokens=3)
    assert llm.forward(IDS).tobytes() == plain.tobytes()
    assert llm.generate(IDS, max_tokens=6).token_ids == said.token_ids
    assert llm.engine.pool.num_free == free


def test_a_patched_answer_is_not_kept(llm: LLM) -> None:
    said = llm.generate(IDS, max_tokens=6).token_ids
    with llm.tap([], patch={"layers.0.residual": lambda x: -x}):
        patched = llm.generate(IDS, max_tokens=6).token_ids
    assert patched != said
    assert llm.generate(IDS, max_tokens=6).token_ids == said


def test_recording_while_generating_records_every_step(llm: LLM) -> None:
    plain = llm.generate(IDS[:40], max_tokens=5)
    with llm.tap(["layers.1.residual", "logits"]) as recording:
        said = llm.generate(IDS[:40], max_tokens=5)
    assert said.token_ids == plain.token_ids
    assert recording["layers.1.residual"].shape == (44, 64)  # the fifth token is never read
    assert [len(step) for step in recording.steps["layers.1.residual"]] == [40, 1, 1, 1, 1]
    assert recording["logits"].argmax(axis=1).tolist() == list(said.token_ids)


def test_the_other_experiments(llm: LLM, tiny_folder: Callable[..., Path]) -> None:
    other = LLM(tiny_folder("qwen2"), interpreter="reference", max_context=256, kv_type="f32", activations="f32")
    assert diff_models(other, llm, IDS, tolerance=1e-2).first is None
    whole = score(llm, IDS)
    assert len(whole.judged) == 69
    assert perplexity(llm, IDS, 128).ppl == pytest.approx(whole.perplexity)
