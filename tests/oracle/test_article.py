"""The numbers everyone quotes of Qwen2.5-0.5B, out of the report on the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cutaway.experiments.report import Report, Settings, report
from cutaway.files import store
from cutaway.render import render
from cutaway.render.views import report as view

pytestmark = pytest.mark.slow
PROMPT = "用一句话介绍什么是 Transformer。"


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    if store.DEFAULT not in [here.name for here in store.installed()]:
        pytest.skip("the default model is not here: cutaway pull")
    from cutaway import LLM

    with LLM(store.DEFAULT, max_context=1024) as found:
        yield found


@pytest.fixture(scope="module")
def made(llm: Any) -> Report:
    return report(llm, PROMPT, Settings(tokens=24, lengths=(16, 64), budget_s=20.0, continuations=3, context=32768))


def test_shapes(made: Report) -> None:
    rows = {row.name: row for row in made.trace.table}
    tokens = len(made.trace.ids)
    assert rows["embed"].output_shape == (tokens, 896)
    assert [rows[f"layers.{i}.residual"].output_shape for i in range(24)] == [(tokens, 896)] * 24
    assert "layers.24.residual" not in rows
    assert rows["logits"].output_shape == (tokens, 151936)
    assert made.model.params == 494_032_768 + (
        0 if made.model.tied_head else 136_134_656
    )  # the file has its head apart


def test_memory(made: Report) -> None:
    assert made.plan.bytes_per_token == 12 * 1024
    assert made.plan.kv_bytes == 384 << 20
    mha = next(variant for variant in made.plan.variants if variant.name == "MHA f16")
    assert (mha.nbytes, mha.ratio) == (2688 << 20, 7.0)


def test_predicted_is_allocated(llm: Any) -> None:
    from cutaway.experiments.kv import plan

    assert plan(llm.config, 0, llm.max_context).kv_bytes == llm.engine.kv_cache.nbytes


def test_the_estimate_of_scratch_is_on_the_safe_side(llm: Any) -> None:
    from cutaway.experiments.kv import scratch_estimate
    from cutaway.forward.native import NativeProgram

    fresh = NativeProgram(llm.program, llm.checkpoint.weights, max_context=llm.max_context)
    own, llm.engine.interpreter = llm.engine.interpreter, fresh
    try:
        llm.generate(list(range(100, 700)), max_tokens=2)
    finally:
        llm.engine.interpreter = own
    assert 0.9 < scratch_estimate(llm.config) / fresh.scratch_nbytes < 2.5


def test_the_cache_changes_the_time_and_not_the_text(made: Report) -> None:
    short, long = made.bench.rows
    assert made.bench.same
    assert made.bench.steps_compared >= 12
    assert 1 < short.ratio < long.ratio


def test_greedy_is_stable_and_temperatures_are_told_apart(made: Report) -> None:
    assert made.stability.same
    cold, hot = made.temperatures.rows
    assert (cold.temperature, hot.temperature) == (0.3, 1.5)
    assert cold.entropy_nats < hot.entropy_nats / 2
    assert cold.greedy_share > hot.greedy_share
    assert cold.distinct_2 is not None
    assert hot.distinct_2 is not None
    assert cold.distinct_2 < hot.distinct_2


def test_smaller_types_cost_what_they_should(made: Report) -> None:
    rows = {(row.k_type, row.v_type): row for row in made.quality.rows}
    assert rows["f16", "f16"].kl_mean < 0.02
    assert all(row.same_top > 0.9 for row in rows.values())
    errors = rows["q8_0", "q8_0"].layer_errors
    assert len(errors) == 24
    assert all(0 < a < b for a, b in zip(rows["f16", "f16"].layer_errors, errors, strict=True))


def test_both_languages(made: Report) -> None:
    assert "2,688 MiB = 2.625 GiB = 2.82 GB" in render(view.report(made), "md")
    assert "2,688 MiB = 2.625 GiB = 2.82 GB" in render(view.report(made, "zh"), "html", data=made)
