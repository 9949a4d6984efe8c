"""What a draw tells of itself: the record of a step, stage by stage, and log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import script

from cutaway.engine.dialects import DIALECTS
from cutaway.engine.sampling import SamplingParams, candidates, draw_token, uniform
from cutaway.engine.stages import History

NOTHING = History((), ())
RNG = np.random.default_rng(5)


def recorded(logits, history=NOTHING, **settings):
    c = candidates(np.array([logits], np.float32), 0)
    return draw_token(c, SamplingParams(**settings), history, seed=9, index=0, position=5, record=True)


def test_a_record_of_every_stage():
    drawn = recorded(
        np.log([0.4, 0.3, 0.2, 0.1]),
        History([0], [1]),
        temperature=0.5,
        top_k=3,
        top_p=0.8,
        logit_bias={3: 1.0},
        repetition_penalty=1.0001,
        presence_penalty=0.001,
        min_p=0.001,
    )
    step = drawn.record
    names = [stage.name for stage in step.stages]
    assert names == [
        "model",
        "logit_bias",
        "repetition_penalty",
        "presence_frequency",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    ]
    model, top_k, top_p = step.stages[0], step.stages[5], step.stages[6]
    assert model.ids.tolist() == [0, 1, 2, 3]
    assert model.probabilities == pytest.approx([0.4, 0.3, 0.2, 0.1], rel=1e-6)
    assert (top_k.kept, top_k.removed) == (3, 1)
    assert 0 < top_k.removed_mass < 1
    before = step.stages[4].probabilities
    assert top_k.removed_mass == pytest.approx(before[-1], rel=1e-9)
    assert top_p.kept + top_p.removed == 3
    assert step.token == drawn.token
    low, high = step.interval
    assert low <= step.draw < high
    assert step.draw == uniform(9, 0, 5)
    assert high - low == pytest.approx(math.exp(step.logprob_processed))


def test_a_record_shows_at_most_fifty_and_counts_all():
    step = recorded(RNG.normal(0, 1, 500), temperature=1).record
    assert len(step.stages[0].ids) == 50
    assert step.stages[0].kept == 500
    assert step.stages[0].probabilities.tolist() == sorted(step.stages[0].probabilities, reverse=True)


def test_entropies_and_logprobs_raw_and_processed():
    logits = np.log([0.5, 0.25, 0.25])
    step = recorded(logits, temperature=1, top_k=1).record
    assert step.entropy_raw_nats == pytest.approx(1.5 * math.log(2), rel=1e-6)
    assert step.entropy_processed_nats == 0
    assert step.logprob_raw == pytest.approx(math.log(0.5), rel=1e-6)
    assert step.logprob_processed == 0
    assert step.rank == 1


def test_logprobs_are_of_the_model_and_of_the_draw():
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    params = SamplingParams(temperature=0.5, top_k=2, logprobs=3, seed=1)
    told = draw_token(candidates(logits, 0), params, NOTHING, seed=1, index=0, position=0, record=False).logprobs
    assert [token for token, _ in told.top_raw] == [3, 2, 1]
    assert [p for _, p in told.top_raw] == pytest.approx(np.log([0.4, 0.3, 0.2]), rel=1e-5)
    assert [token for token, _ in told.top_processed] == [3, 2]
    assert [p for _, p in told.top_processed] == pytest.approx(np.log([16 / 25, 9 / 25]), rel=1e-5)
    assert told.raw == dict(told.top_raw)[told.token]
    assert told.processed == dict(told.top_processed)[told.token]
    assert told.rank == {3: 1, 2: 2}[told.token]


def test_rank_counts_ties_by_id():
    logits = np.array([[1, 2, 2, 0]], np.float32)
    params = SamplingParams(logit_bias={2: 1.0}, logprobs=0)
    told = draw_token(candidates(logits, 0), params, NOTHING, seed=0, index=0, position=0, record=False).logprobs
    assert (told.token, told.rank, told.top_raw) == (2, 2, ())


FLAT, PEAKED, HALF, HIGH, LOW = "flat", "peaked", "half banned", "high", "low"


def wide(kind: str, vocab: int = 20_000) -> np.ndarray:
    """A row wide enough for the sums in float32."""
    logits = RNG.normal(0, 0.001 if kind == FLAT else 2.5, vocab).astype(np.float32)
    if kind == PEAKED:
        logits[7] = 25
    if kind == HALF:
        logits[::2] = -np.inf
    if kind in (HIGH, LOW):
        logits += 90 if kind == HIGH else -150
    return logits


@pytest.mark.parametrize("kind", ["", FLAT, PEAKED, HALF, HIGH, LOW])
@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_k": 300, "top_p": 0.9}, {"min_p": 0.1}, {}])
def test_a_record_of_a_wide_row_is_right_to_what_it_says(kind, settings):
    logits = wide(kind)
    for t in (0.2, 0.8, 1, 3):
        for history, penalty in ((NOTHING, 1), (History([1, 7, 9], []), 1.5)):
            step = recorded(logits, history, temperature=t, repetition_penalty=penalty, **settings).record
            x = logits.astype(np.float64)
            raw = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
            if penalty != 1:
                x[[1, 7, 9]] = np.where(x > 0, x / penalty, x * penalty)[[1, 7, 9]]
            drawn = np.exp((x - x.max()) / t) / np.exp((x - x.max()) / t).sum()
            before = [stage for stage in step.stages if stage.removed == 0][-1]
            for stage, p in ((step.stages[0], raw), (before, drawn)):
                assert stage.ids.tolist() == np.argsort(-p, kind="stable")[:50].tolist()
                assert stage.probabilities == pytest.approx(p[stage.ids], rel=2e-6)
                assert (stage.probabilities <= 1).all()
            entropy = -float(np.sum(raw[raw > 0] * np.log(raw[raw > 0])))
            assert step.entropy_raw_nats == pytest.approx(entropy, abs=1e-5)
            assert step.logprob_raw == pytest.approx(math.log(raw[step.token]), abs=2e-6)
            assert step.rank == 1 + np.argsort(-raw, kind="stable").tolist().index(step.token)
            kept = step.stages[-1].kept
            processed = np.sort(drawn)[::-1][:kept] / np.sort(drawn)[::-1][:kept].sum()
            own = processed[processed > 0]
            assert step.entropy_processed_nats == pytest.approx(-float(np.sum(own * np.log(own))), abs=1e-5)
            removed = 1 - math.prod(1 - stage.removed_mass for stage in step.stages)
            assert removed == pytest.approx(1 - np.sort(drawn)[::-1][:kept].sum(), abs=2e-6)


def test_a_probability_is_never_above_one_and_an_entropy_never_below_zero():
    for peak in np.linspace(10, 60, 50):
        logits = np.full(5000, -30, np.float32)
        logits[9] = peak
        step = recorded(logits, temperature=0.9, top_k=2).record
        assert all(stage.probabilities[0] <= 1 for stage in step.stages)
        assert step.entropy_raw_nats >= 0
        assert step.logprob_raw <= 0


def test_logprobs_beside_a_record_are_those_without_one():
    for logits in (wide(""), wide(FLAT)):
        for settings in ({"temperature": 0.8, "top_k": 50}, {"temperature": 0}, {"temperature": 1, "top_p": 0.9}):
            params = SamplingParams(logprobs=5, **settings)
            told = [
                draw_token(candidates(logits[None], 0), params, NOTHING, seed=4, index=0, position=3, record=record)
                for record in (False, True)
            ]
            assert told[0].logprobs == told[1].logprobs
            assert told[1].record.logprob_raw == pytest.approx(told[1].logprobs.raw, rel=1e-15)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_recording_changes_no_draw_of_a_wide_row(dialect):
    for settings in ({}, {"top_k": 50}, {"top_k": 100, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_p": 0.5}):
        for t, penalty in ((0, 1), (0.8, 1), (0.8, 1.2), (1, 1), (1.5, 1)):
            params = SamplingParams(temperature=t, repetition_penalty=penalty, dialect=dialect, **settings)
            for position, kind in enumerate(("", FLAT, PEAKED)):
                logits, history = wide(kind, 5000), History([3, 4], [5])
                tokens = {
                    draw_token(
                        candidates(logits[None], 0), params, history, seed=1, index=0, position=position, record=record
                    ).token
                    for record in (False, True)
                }
                assert len(tokens) == 1


def test_recording_changes_no_draw():
    for settings in ({}, {"temperature": 1}, {"temperature": 1, "top_k": 5, "top_p": 0.9}):
        params = SamplingParams(**settings)
        for position, logits in enumerate(RNG.normal(0, 3, (20, 300)).astype(np.float32)):
            c = candidates(logits[None], 0)
            with_record = draw_token(c, params, NOTHING, seed=4, index=0, position=position, record=True)
            c = candidates(script.top(logits[None], params.head_top_k), 0)
            without = draw_token(c, params, NOTHING, seed=4, index=0, position=position, record=False)
            assert with_record.token == without.token
