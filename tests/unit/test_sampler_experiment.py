"""How tokens are chosen, temperatures, dialects, loops."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from glass_llm import GlassLLM
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engine.sampling import SamplingParams
from cutaway.errors import RequestError
from cutaway.experiments.distributions import log_softmax
from cutaway.experiments.loops import distinct, find_loop
from cutaway.experiments.sampler import Origin, dialects, sample, temperatures
from cutaway.render import render
from cutaway.render.views import sampler as view

PROMPT = "the quick brown"
WARM = SamplingParams(temperature=1.1, top_k=30, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> GlassLLM:
    return GlassLLM()


# -- step by step -----------------------------------------------------------------------------------------------------


def test_a_step_tells_how_its_token_was_chosen(llm: GlassLLM) -> None:
    result = sample(llm, PROMPT, WARM)
    assert result.chain == ("temperature", "top_k", "top_p")
    assert [stage.name for stage in result.steps[0].stages] == ["model", *result.chain]
    ids = llm.tokenize(PROMPT)
    for step in result.steps:
        logprobs = log_softmax(llm.forward(ids)[-1])
        assert step.position == len(ids)
        assert step.probability_raw == pytest.approx(math.exp(logprobs[step.token]), rel=1e-5)
        assert step.rank == 1 + int((logprobs > logprobs[step.token]).sum())
        assert step.entropy_raw_nats == pytest.approx(-float(np.sum(np.exp(logprobs) * logprobs)), rel=1e-5)
        assert step.draw is not None
        assert step.interval[0] <= step.draw < step.interval[1]
        assert step.interval[1] - step.interval[0] == pytest.approx(step.probability_processed)
        kept = [stage.kept for stage in step.stages]
        assert kept == sorted(kept, reverse=True)
        assert [stage.removed for stage in step.stages] == [0, 0, 67, 30 - kept[-1]]
        ids.append(step.token)
    assert result.text == llm.detokenize([step.token for step in result.steps])
    assert result.seed == 7


def test_greedy_stands_beside_it(llm: GlassLLM) -> None:
    result = sample(llm, PROMPT, WARM)
    ids, greedy = llm.tokenize(PROMPT), []
    for _ in range(8):
        greedy.append(int(llm.forward([*ids, *greedy])[-1].argmax()))
    assert result.greedy_text == llm.detokenize(greedy)
    drawn = [step.token for step in result.steps]
    assert result.fork == next(i for i in range(8) if drawn[i] != greedy[i])


def test_temperature_zero_is_greedy_and_does_not_fork(llm: GlassLLM) -> None:
    result = sample(llm, PROMPT, SamplingParams(max_tokens=5))
    assert result.fork is None
    assert result.text == result.greedy_text
    assert all(step.draw is None and step.rank == 1 for step in result.steps)
    assert "Greedy: the most probable" in render(view.sampled(result), "terminal")


def test_every_setting_has_its_origin(llm: GlassLLM) -> None:
    result = sample(llm, PROMPT, WARM, settings={"top_k": Origin(30, "model"), "temperature": Origin(1.1, "flag")})
    text = render(view.sampled(result), "md")
    assert "| top\\_k | 30 | model |" in text
    assert "| temperature | 1.1 | flag |" in text
    assert sample(llm, PROMPT, WARM).settings["top_p"] == Origin(0.9, "request")


def test_the_view_shows_stages_draw_and_mass(llm: GlassLLM) -> None:
    result = sample(llm, PROMPT, WARM)
    text = render(view.sampled(result, steps=2), "terminal")
    assert text.count("mass removed") == 2
    assert text.count("▲") == 2
    assert f"▲ {result.steps[0].draw:.6f}" in text
    assert "候选数" in render(view.sampled(result, "zh"), "terminal")
    assert json.loads(render(view.sampled(result), "json", data=result))["steps"][0]["token"] == result.steps[0].token


# -- temperatures -----------------------------------------------------------------------------------------------------


def test_temperatures_are_told_apart_by_numbers(llm: GlassLLM) -> None:
    result = temperatures(llm, PROMPT, [0.3, 1.5], SamplingParams(max_tokens=12, ignore_eos=True), continuations=6)
    cold, hot = result.rows
    assert cold.entropy_nats < hot.entropy_nats - 0.5
    assert cold.greedy_probability > hot.greedy_probability + 0.2
    assert cold.greedy_share > hot.greedy_share
    assert cold.rank < hot.rank
    assert cold.distinct_2 < hot.distinct_2
    assert cold.first_entropy_nats < hot.first_entropy_nats
    assert [c.id for c in cold.first] == [c.id for c in hot.first]
    assert (len(cold.texts), result.continuations, result.seed, result.max_tokens) == (6, 6, 0, 12)


def test_the_first_distribution_is_the_softmax_at_that_temperature(llm: GlassLLM) -> None:
    row = temperatures(llm, PROMPT, [0.7], SamplingParams(max_tokens=2), 1).rows[0]
    expected = np.exp(log_softmax(llm.forward(llm.tokenize(PROMPT))[-1].astype(np.float64) / 0.7))
    assert [c.probability for c in row.first] == pytest.approx([expected[c.id] for c in row.first], rel=1e-5)


def test_the_same_seed_gives_the_same_texts(llm: GlassLLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3)
    first, again = (temperatures(llm, PROMPT, [1.0], params, 3) for _ in range(2))
    assert first.rows[0].texts == again.rows[0].texts
    assert "T = 1" in render(view.temperatures(first), "terminal")
    assert "温度" in render(view.temperatures(first, "zh"), "html")


def test_no_temperature_or_a_bad_one_is_refused(llm: GlassLLM) -> None:
    with pytest.raises(RequestError, match="no temperature"):
        temperatures(llm, PROMPT, [], SamplingParams())
    with pytest.raises(RequestError, match="temperature"):
        temperatures(llm, PROMPT, [-1.0], SamplingParams())


# -- dialects ---------------------------------------------------------------------------------------------------------


def test_dialects_keep_different_candidates(llm: GlassLLM) -> None:
    """top-p after temperature 1.5 sees a flatter distribution than top-p before it, so it keeps more."""
    result = dialects(llm, PROMPT, SamplingParams(temperature=1.5, top_p=0.8))
    rows = {row.dialect: row for row in result.rows}
    assert list(rows) == ["cutaway", "hf", "vllm", "llama.cpp", "mlx"]
    assert rows["hf"].kept == rows["cutaway"].kept > rows["llama.cpp"].kept == rows["mlx"].kept
    assert rows["llama.cpp"].chain == ("top_p", "temperature")
    assert sum(result.probabilities["mlx"]) <= 1 + 1e-9
    text = render(view.dialects(result), "terminal")
    assert "top_p → temperature" in text


def test_a_dialect_that_would_refuse_says_so_and_the_others_go_on(llm: GlassLLM) -> None:
    result = dialects(llm, PROMPT, SamplingParams(temperature=1.0, presence_penalty=0.5), ["hf", "vllm"])
    assert "presence_penalty" in result.rows[0].refused
    assert result.rows[1].kept == llm.config.vocab
    assert list(result.probabilities) == ["vllm"]
    assert render(view.dialects(result, "zh"), "terminal")
    with pytest.raises(RequestError, match="dialect"):
        dialects(llm, PROMPT, SamplingParams(), ["ollama"])


# -- loops ------------------------------------------------------------------------------------------------------------


def test_a_loop_is_found_with_its_place_and_span() -> None:
    found = find_loop([9, 8, *[1, 2, 3] * 4, 1])
    assert found is not None
    assert (found.start, found.period, found.tokens, found.at_end) == (2, 3, 13, True)
    assert found.copies == pytest.approx(13 / 3)
    inside = find_loop([5, *[4] * 9, 6, 7])
    assert inside is not None
    assert (inside.start, inside.period, inside.tokens, inside.at_end) == (1, 1, 9, False)


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3] * 2, [4, 4, 4], list(range(50)), [1, 2, 3, 4, 5, 6] * 2 + [1, 2]])
def test_what_is_no_loop(ids: list[int]) -> None:
    assert find_loop(ids) is None


@given(st.lists(st.integers(0, 3), max_size=40))
def test_a_found_loop_repeats(ids: list[int]) -> None:
    found = find_loop(ids)
    if found is None:
        runs = [n for n in range(1, len(ids) // 3 + 1) for i in range(len(ids) - max(8, 3 * n) + 1)
                if all(ids[j] == ids[j + n] for j in range(i, i + max(8, 3 * n) - n))]  # fmt: skip
        assert runs == []
        return
    span = ids[found.start : found.start + found.tokens]
    assert len(span) == found.tokens >= 8
    assert all(a == b for a, b in zip(span, span[found.period :], strict=False))
    assert found.copies >= 3


def test_a_loop_in_greedy_text_is_reported() -> None:
    llm = GlassLLM(seed=3)
    result = sample(llm, "aaaa", SamplingParams(max_tokens=60, ignore_eos=True))
    assert result.loop is not None
    assert result.loop == result.greedy_loop
    assert "a loop, from token" in render(view.sampled(result, steps=0), "terminal")


def test_distinct_counts_n_grams_over_all_texts() -> None:
    assert distinct([[1, 2, 3], [1, 2, 4]], 1) == 4 / 6
    assert distinct([[1, 2, 3], [1, 2, 4]], 2) == 3 / 4
    assert distinct([[1]], 2) is None
