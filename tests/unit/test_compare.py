"""compare: two conditions on the same forced tokens, against numbers worked out one forward pass at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
from fake_llm import FakeLLM

from cutaway.experiments.compare import (
    Condition,
    compare,
    divergence_summary,
    same_vocabulary,
    template_end_tokens,
)
from cutaway.experiments.distributions import log_softmax
from cutaway.experiments.score import perplexity

PROMPT = "Say hello"


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(scope="module")
def other() -> FakeLLM:
    return FakeLLM(seed=1, name="other")


def test_both_read_both_answers(llm: FakeLLM, other: FakeLLM) -> None:
    found = compare(Condition(llm, "A", chat=False), Condition(other, "B", chat=True), PROMPT, max_tokens=6)
    assert found.same_vocabulary
    assert [run.source for run in found.forced] == ["A", "B"]
    prompts = (llm.tokenize(PROMPT), other.chat_ids([{"role": "user", "content": PROMPT}]))
    assert (found.a.prompt_tokens, found.b.prompt_tokens) == (len(prompts[0]), len(prompts[1]))
    assert found.b.prompt == other.detokenize(prompts[1])
    for run in found.forced:
        for at in range(len(run.ids)):
            rows = [
                log_softmax(model.forward([*prompt, *run.ids[:at]])[-1])
                for model, prompt in zip((llm, other), prompts, strict=True)
            ]
            for side, row in zip((run.a, run.b), rows, strict=True):
                assert side is not None
                assert side.logprob[at] == pytest.approx(row[run.ids[at]], abs=1e-4)
                assert side.best[at] == row.argmax()
                assert side.end_probability[at] == pytest.approx(math.exp(row[0]), abs=1e-6)
            assert run.kl_ab is not None
            assert run.kl_ba is not None
            assert run.kl_ab[at] == pytest.approx((np.exp(rows[0]) * (rows[0] - rows[1])).sum(), abs=1e-4)
            assert run.kl_ba[at] == pytest.approx((np.exp(rows[1]) * (rows[1] - rows[0])).sum(), abs=1e-4)
    assert found.forced[0].a is not None
    assert found.forced[0].a.rank.tolist() == [1] * len(found.a.ids)  # it wrote them greedily
    assert found.divergence is not None
    kld = np.concatenate([run.kl_ab for run in found.forced if run.kl_ab is not None])
    assert found.divergence.positions == len(kld)
    assert found.divergence.mean_kld == pytest.approx(kld.mean())


def test_a_model_against_itself(llm: FakeLLM) -> None:
    found = compare(Condition(llm, "A", chat=False), Condition(llm, "B", chat=False), PROMPT, max_tokens=5)
    assert found.a.text == found.b.text
    assert found.same_ids == len(found.a.ids)
    assert found.divergence is not None
    assert (found.divergence.mean_kld, found.divergence.same_top, found.divergence.rms_delta_p) == (0.0, 1.0, 0.0)


def test_settings_of_one_side(llm: FakeLLM) -> None:
    warm = Condition(llm, "warm", chat=False, sampling={"temperature": 1.0, "max_tokens": 3})
    found = compare(Condition(llm, "greedy", chat=False), warm, PROMPT, max_tokens=5)
    assert (len(found.a.ids), len(found.b.ids)) == (5, 3)
    assert found.same_ids == 0
    assert found.forced[1].a is not None
    assert found.forced[1].a.rank.tolist() == [2, 2, 2]


def test_the_token_an_answer_stopped_at_is_read_too(llm: FakeLLM) -> None:
    greedy = llm.generate(llm.tokenize(PROMPT), max_tokens=4).token_ids
    stopped = Condition(llm, "stopped", chat=False, sampling={"stop_token_ids": (greedy[2],)})
    found = compare(stopped, Condition(llm, "free", chat=False), PROMPT, max_tokens=4)
    assert found.a.finish_reason == "stop"
    assert found.a.text == llm.detokenize(greedy[: greedy.index(greedy[2])])
    assert found.a.ids[-1] == greedy[2]
    assert set(found.a.stop_tokens) == {0, greedy[2]}


def test_perplexity_of_a_text(llm: FakeLLM, other: FakeLLM) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    found = compare(Condition(llm, "A"), Condition(other, "B"), PROMPT, max_tokens=2, text=text, window=16)
    assert found.perplexity_a == perplexity(llm, text, 16)
    assert found.perplexity_b == perplexity(other, text, 16)


def test_different_vocabularies(llm: FakeLLM) -> None:
    foreign = FakeLLM(seed=2, name="foreign")
    foreign.tokenizer.token_bytes = lambda token: bytes([token])  # type: ignore[method-assign]
    assert not same_vocabulary(llm, foreign)
    found = compare(Condition(llm, "A"), Condition(foreign, "B"), PROMPT, max_tokens=3, text="Hello", window=4)
    assert found.divergence is None
    assert "different vocabularies" in found.notes[0]
    assert found.forced[0].a is not None
    assert found.forced[0].b is None
    assert found.forced[1].a is None
    assert found.forced[1].b is not None
    assert len(found.forced[1].b.end_probability) == len(found.b.ids)
    assert found.perplexity_a is not None


def test_same_vocabulary(llm: FakeLLM) -> None:
    longer, named = FakeLLM(), FakeLLM()
    longer.tokenizer.vocab_size = 120
    named.tokenizer.control_tokens = {"<eot>": 0, "<start>": 1}
    assert same_vocabulary(llm, FakeLLM())
    assert same_vocabulary(llm, longer)
    assert not same_vocabulary(llm, named)


def test_padded_vocabularies_are_compared(llm: FakeLLM) -> None:
    padded = FakeLLM(replace(tiny.TINY, vocab=100))
    found = compare(Condition(llm, "A", chat=False), Condition(padded, "B", chat=False), PROMPT, max_tokens=3)
    assert found.divergence is not None
    assert np.isfinite(found.divergence.mean_kld)


def test_template_end_token_and_the_stop_set(llm: FakeLLM) -> None:
    assert template_end_tokens(llm) == frozenset({0})
    found = compare(Condition(llm, "A"), Condition(llm, "B", chat=False), PROMPT, max_tokens=1)
    assert found.warnings == ()

    runs_on = FakeLLM()
    runs_on.checkpoint.eos_ids = frozenset({5})
    found = compare(Condition(runs_on, "A"), Condition(runs_on, "B", chat=False), PROMPT, max_tokens=1)
    assert len(found.warnings) == 1  # of the side that uses the template
    assert "A: the chat template ends a turn with" in found.warnings[0]
    assert found.forced[0].a is not None
    row = np.exp(log_softmax(runs_on.forward(runs_on.chat_ids([{"role": "user", "content": PROMPT}]))[-1]))
    assert found.forced[0].a.end_probability[0] == pytest.approx(row[0] + row[5], abs=1e-6)

    runs_on.checkpoint.eos_ids = frozenset()
    found = compare(Condition(runs_on, "A", chat=False), Condition(llm, "B", chat=False), PROMPT, max_tokens=1)
    assert "name no end-of-sequence token" in found.warnings[0]

    plain = FakeLLM()
    plain.chat_template = None
    assert template_end_tokens(plain) == frozenset()


def test_divergence_summary_by_hand() -> None:
    a = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], dtype=np.float32))
    b = np.log(np.array([[0.5, 0.5], [0.1, 0.9]], dtype=np.float32))
    found = divergence_summary(a, b, np.array([0, 1]))
    kld = 0.8 * math.log(9)
    assert found.mean_kld == pytest.approx(kld / 2, rel=1e-5)
    assert found.median_kld == pytest.approx(kld / 2, rel=1e-5)
    assert found.max_kld == pytest.approx(kld, rel=1e-5)
    assert found.kld_99_9 == pytest.approx(0.999 * kld, rel=1e-5)  # between two values, in a straight line
    assert found.same_top == 0.5
    assert found.mean_delta_p == pytest.approx(0.4, rel=1e-5)
    assert found.rms_delta_p == pytest.approx(0.8 / math.sqrt(2), rel=1e-5)
