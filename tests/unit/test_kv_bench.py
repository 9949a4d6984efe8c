"""The KV cache on and off, and the types of it compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import steps
from glass_llm import GlassLLM

from cutaway.engine.sampling import SamplingParams
from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.distributions import log_softmax
from cutaway.experiments.generating import generate, request_ids
from cutaway.experiments.kv_bench import _interpolated, bench, rates, step_work
from cutaway.experiments.kv_quality import quality
from cutaway.render import render
from cutaway.render.views import kv as view

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def llm() -> GlassLLM:
    return GlassLLM()


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock that is `step` further at every look."""
    now = [0.0]

    def clock() -> float:
        now[0] += step
        return now[0]

    return clock


# -- rates ------------------------------------------------------------------------------------------------------------


def test_prefill_is_never_charged_to_decode() -> None:
    found = rates(500, [2.0, *[0.1] * 9])
    assert found.first_token_s == 2.0
    assert found.prefill_tokens_s == 250.0
    assert found.decode_tokens == 9
    assert found.decode_tokens_s == pytest.approx(10.0)


def test_one_token_has_no_decode_rate() -> None:
    assert rates(3, [0.5]).decode_tokens_s is None


# -- on and off -------------------------------------------------------------------------------------------------------


def test_the_text_is_the_same_and_every_step_is_compared(llm: GlassLLM) -> None:
    result = bench(llm, "hello", (8, 24), budget_s=None)
    assert result.same
    assert result.steps_compared == 24
    assert result.off_measured == tuple(range(24))
    assert [row.length for row in result.rows] == [8, 24]
    assert not any(row.off_estimated for row in result.rows)
    assert len(result.text) == 24


def test_the_numbers_are_the_clock_s(llm: GlassLLM) -> None:
    result = bench(llm, "hello", (4,), budget_s=None, clock=ticking())
    assert result.on_step_s == result.off_step_s == (1.0, 1.0, 1.0, 1.0)
    assert (result.rows[0].on_s, result.rows[0].off_s, result.rows[0].ratio) == (4.0, 4.0, 1.0)
    assert result.rates.prefill_tokens_s == 5.0
    assert result.rates.decode_tokens_s == 1.0


def test_past_the_budget_steps_are_sampled_and_still_compared(llm: GlassLLM) -> None:
    result = bench(llm, "hello", (8, 64), budget_s=9.5, clock=ticking())
    assert result.same
    assert result.off_measured[:10] == tuple(range(10))
    assert result.off_measured[-1] == 63
    assert len(result.off_measured) == 10 + 12
    assert len(result.off_step_s) == 64
    assert [row.off_estimated for row in result.rows] == [False, True]
    assert "interpolated" in render(view.bench(result), "terminal")


def test_times_between_measured_steps_lie_on_a_line() -> None:
    assert _interpolated({0: 1.0, 4: 3.0, 5: 7.0}, 6) == [1.0, 1.5, 2.0, 2.5, 3.0, 7.0]


class Forgetful:
    """An interpreter that answers long prefills otherwise than single tokens: law 1 broken on purpose."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> Any:
        logits = self.inner.run(batch, kv_cache, taps)
        if len(batch.token_ids) > 12 and isinstance(logits, np.ndarray):
            logits = -logits
        return logits


@pytest.mark.parametrize("budget_s", [None, 1.5])
def test_a_difference_is_told(budget_s: float | None) -> None:
    llm = GlassLLM()
    llm.interpreter = Forgetful(llm.interpreter)
    _no_partial_head(llm)
    result = bench(llm, "hello", (16,), budget_s=budget_s, clock=ticking())
    assert not result.same
    assert "must not happen" in render(view.bench(result), "terminal")


def _no_partial_head(llm: GlassLLM) -> None:
    """Make the engine ask for all logits, which Forgetful can turn around."""
    run = llm.interpreter.inner.run

    def whole(batch: Any, kv_cache: Any, taps: Any = None) -> Any:
        object.__setattr__(batch, "head_top_k", None)
        return run(batch, kv_cache, taps)

    llm.interpreter.inner.run = whole


def test_work_is_counted(llm: GlassLLM) -> None:
    on, off = step_work(llm, 40, True), step_work(llm, 40, False)
    assert (on.num_tokens, off.num_tokens) == (1, 40)
    head = 2 * llm.config.hidden * llm.config.vocab  # the output head computes one row in both
    assert (off.flops - head) / (on.flops - head) == pytest.approx(40, rel=0.1)
    assert on.weight_bytes <= off.weight_bytes < on.weight_bytes * 1.1
    assert on.kv_bytes == llm.kv_bytes_per_token * 41
    assert off.kv_bytes == llm.kv_bytes_per_token * 80


def test_lengths_that_do_not_fit_are_refused(llm: GlassLLM) -> None:
    with pytest.raises(ContextLengthError, match=r"5 \+ 300 tokens"):
        bench(llm, "hello", (300,))
    with pytest.raises(RequestError, match="lengths"):
        bench(llm, "hello", (1,))


def test_both_languages(llm: GlassLLM) -> None:
    result = bench(llm, "hello", (4, 8))
    assert "Why Q is not cached" in render(view.bench(result), "terminal")
    assert "为什么不缓存 Q" in render(view.bench(result, "zh"), "html", data=result)


# -- continuations ----------------------------------------------------------------------------------------------------


def test_a_continuation_ends_at_its_stop_string(llm: GlassLLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    whole = generate(llm, llm.tokenize("hello"), params)[0]
    stop = whole.text[4:6]
    cut = generate(llm, llm.tokenize("hello"), replace(params, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"


def test_the_token_that_ends_a_text_is_not_in_it(llm: GlassLLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    ids = generate(llm, llm.tokenize("hello"), params)[0].ids
    cut = generate(llm, llm.tokenize("hello"), replace(params, stop_token_ids=(ids[3],)), record=True)[0]
    assert cut.ids == ids[: ids.index(ids[3])]
    assert cut.finish_reason == "stop"
    assert len(cut.records) == len(cut.ids) + 1


def test_several_continuations_are_those_of_each_alone(llm: GlassLLM) -> None:
    ids = llm.tokenize("hello")
    params = SamplingParams(temperature=1.2, seed=5, max_tokens=9, n=3)
    several = generate(llm, ids, params)
    assert several[0].ids == generate(llm, ids, replace(params, n=1))[0].ids
    assert len({one.ids for one in several}) == 3
    assert several[0].step_s == ()


def test_a_prompt_goes_through_the_template_unless_raw(llm: GlassLLM) -> None:
    assert request_ids(llm, "hi") == llm.chat_ids([{"role": "user", "content": "hi"}])
    assert request_ids(llm, "hi", raw=True) == llm.tokenize("hi")


# -- types ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(llm: GlassLLM) -> Any:
    return quality(llm, TEXT)


def test_float32_is_the_measure(compared: Any) -> None:
    first = compared.rows[0]
    assert (first.k_type, first.v_type) == ("f32", "f32")
    assert (first.kl_mean, first.kl_999, first.kl_max, first.same_top) == (0.0, 0.0, 0.0, 1.0)
    assert first.layer_errors == (0.0, 0.0)


def test_fewer_bits_lie_further_off(compared: Any) -> None:
    rows = {(row.k_type, row.v_type): row for row in compared.rows}
    assert set(rows) == {("f32", "f32"), ("f16", "f16"), ("f16", "q8_0"), ("q8_0", "f16"), ("q8_0", "q8_0")}
    f16, q8 = rows["f16", "f16"], rows["q8_0", "q8_0"]
    assert 0 < f16.kl_mean < q8.kl_mean / 10
    assert q8.kl_mean <= q8.kl_999 <= q8.kl_max
    assert all(0 < a < b / 3 for a, b in zip(f16.layer_errors, q8.layer_errors, strict=True))
    assert [row.bytes_per_token for row in compared.rows] == [1024, 512, 392, 392, 272]


def test_perplexity_is_that_of_one_forward_pass(llm: GlassLLM, compared: Any) -> None:
    ids = llm.tokenize(TEXT)
    logprobs = log_softmax(llm.forward(ids))[np.arange(len(ids) - 1), ids[1:]]
    assert compared.rows[0].perplexity == pytest.approx(float(np.exp(-logprobs.mean())), rel=1e-6)
    assert compared.num_tokens == compared.text_tokens == len(ids)


def test_the_divergence_is_from_float32_to_the_type(llm: GlassLLM, compared: Any) -> None:
    exact, rounded = (
        steps.Stage(llm.interpreter, llm.config, kind).logits(llm.tokenize(TEXT)) for kind in ("f32", "q8_0")
    )
    p, q = log_softmax(exact), log_softmax(rounded)
    expected = (np.exp(p) * (p - q)).sum(axis=1)
    backwards = (np.exp(q) * (q - p)).sum(axis=1)
    row = compared.rows[-1]
    assert row.kl_mean == pytest.approx(expected.mean(), rel=1e-4)
    assert row.kl_max == pytest.approx(expected.max(), rel=1e-4)
    assert row.kl_mean != pytest.approx(backwards.mean(), rel=1e-4)
    assert row.same_top == (exact.argmax(axis=1) == rounded.argmax(axis=1)).mean()


def test_a_layer_answers_for_its_own_error_only() -> None:
    """With only layer 1's keys spoilt, layer 0 shows none and layer 1 does; spoilt layer 0 leaves layer 1 alone."""
    llm = GlassLLM()
    inner = llm.interpreter

    class Spoiling:
        layer = 0

        def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> Any:
            if kv_cache.k_type == "f16":
                kv_cache.v = list(kv_cache.v)
                kv_cache.v[self.layer][...] = kv_cache.v[self.layer] * np.float16(0.5)
            return inner.run(batch, kv_cache, taps)

    llm.interpreter = Spoiling()
    for layer in (0, 1):
        Spoiling.layer = layer
        errors = quality(llm, TEXT, [("f16", "f16")]).rows[1].layer_errors
        assert errors[layer] > 0.1
        assert errors[1 - layer] < 0.01


def test_a_text_that_is_cut_says_so(llm: GlassLLM) -> None:
    result = quality(llm, TEXT, [("f16", "f16")], limit=40)
    assert (result.num_tokens, result.text_tokens) == (40, len(TEXT))
    assert f"The text has {len(TEXT)}" in " ".join(render(view.quality(result), "terminal").split())


def test_the_decode_steps_have_room_in_the_context(llm: GlassLLM) -> None:
    result = quality(llm, TEXT * 2, [("f16", "f16")], limit=10_000)
    assert result.num_tokens == llm.max_context - 16


def test_a_text_too_short_or_a_type_unknown_is_refused(llm: GlassLLM) -> None:
    with pytest.raises(RequestError, match="too short"):
        quality(llm, "a")
    with pytest.raises(RequestError, match="q4_0"):
        quality(llm, "abc", [("q4_0", "f16")])
