"""Public bug reports about sampling, each with its small input and its right answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import script

from cutaway.engine.sampling import SamplingParams, candidates, draw_token
from cutaway.engine.stages import Candidates, History
from cutaway.errors import RequestError


def kept(logits, params: SamplingParams, prompt=(), output=()) -> Candidates:
    """What the chain leaves to draw from."""
    c = candidates(np.array([logits], np.float32), 0)
    history = History(prompt, output)
    for _, stage in params.chain:
        c = stage(c, history)
    return c


def distribution(logits, **settings) -> dict[int, float]:
    c = kept(logits, SamplingParams(**settings))
    return dict(zip(c.ids.tolist(), c.probabilities.tolist(), strict=True))


def draw(logits, seed=0, position=0, **settings) -> int:
    c = candidates(np.array([logits], np.float32), 0)
    params = SamplingParams(**settings)
    return draw_token(c, params, History((), ()), seed=seed, index=0, position=position, record=False).token


def test_sampling_temperature_zero():
    for zero in (0, 0.0, -0.0):
        for seed in range(100):
            assert draw([1.0, 2.0, -3.0], seed=seed, temperature=zero, top_k=50, top_p=0.9) == 1
    assert SamplingParams(temperature=-0.0) == SamplingParams()
    with pytest.raises(RequestError) as refused:
        SamplingParams(temperature=-0.5)
    assert refused.value.param == "temperature"


def test_sampling_temperature_zero_keeps_no_nan_in_the_record():
    c = candidates(np.array([[1.0, 2.0, -3.0]], np.float32), 0)
    step = draw_token(c, SamplingParams(), History((), ()), seed=0, index=0, position=0, record=True).record
    numbers = [step.entropy_raw_nats, step.entropy_processed_nats, step.logprob_raw, step.logprob_processed]
    assert all(math.isfinite(number) for number in [*numbers, *step.interval])
    assert all(np.isfinite(stage.probabilities).all() for stage in step.stages)


@pytest.mark.parametrize("k", [5, 6, 100_000, 0, -1, None])
def test_sampling_top_k_range_off(k):
    c, off = (
        kept([0, 1, 2, 3, 4], SamplingParams(temperature=1, top_k=k)),
        kept([0, 1, 2, 3, 4], SamplingParams(temperature=1)),
    )
    assert c.ids.tolist() == off.ids.tolist()
    assert c.probabilities.tobytes() == off.probabilities.tobytes()


def test_sampling_top_k_range():
    assert list(distribution([0, 1, 2, 3, 4], temperature=1, top_k=1)) == [4]
    assert sorted(distribution([0, 1, 2, 3, 4], temperature=1, top_k=4)) == [1, 2, 3, 4]
    for wrong in (2.5, "3", -2):
        with pytest.raises(RequestError) as refused:
            SamplingParams(top_k=wrong)
        assert refused.value.param == "top_k"
        assert isinstance(refused.value, ValueError)


def test_sampling_top_p_zero():
    for seed in range(50):
        assert draw([0.1, 3.0, 0.2], seed=seed, temperature=1, top_p=0) == 1


def test_sampling_top_p_edge():
    logits = np.log([0.25, 0.0625, 0.1875, 0.5])
    assert distribution(logits, temperature=1, top_p=0.7499) == pytest.approx({3: 2 / 3, 0: 1 / 3}, rel=1e-6)
    assert set(distribution(logits, temperature=1, top_p=0.7501)) == {3, 0, 2}
    crossing = distribution(np.log([0.5, 0.375, 0.125]), temperature=1, top_p=0.8)
    assert crossing == pytest.approx({0: 4 / 7, 1: 3 / 7}, rel=1e-6)
    assert len(distribution(logits, temperature=1, top_p=1.0)) == 4
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(RequestError) as refused:
            SamplingParams(top_p=wrong)
        assert refused.value.param == "top_p"


def test_sampling_repetition_penalty_sign():
    # One id from the prompt, one generated: both count. Temperature 1 and no filter, so the logits can be read.
    params = SamplingParams(temperature=1, repetition_penalty=2.0)
    assert kept([2.0, -1.0, 0.5], params, prompt=[0], output=[1]).logits.tolist() == [1.0, -2.0, 0.5]
    off = SamplingParams(temperature=1, repetition_penalty=1.0)
    assert kept([2.0, -1.0, 0.5], off, prompt=[0], output=[1]).logits.tolist() == [2.0, -1.0, 0.5]
    for wrong in (0, 0.0, -1):
        with pytest.raises(RequestError) as refused:
            SamplingParams(repetition_penalty=wrong)
        assert refused.value.param == "repetition_penalty"


def test_sampling_repetition_penalty_once_an_id():
    params = SamplingParams(temperature=1, repetition_penalty=2.0)
    assert kept([8.0, 1.0], params, prompt=[0, 0], output=[0]).logits.tolist() == [4.0, 1.0]


def test_sampling_frequency_presence_scope():
    params = SamplingParams(temperature=1, frequency_penalty=0.5, presence_penalty=0.25)
    assert kept([1, 1, 1], params, prompt=[0, 0], output=[1, 1]).logits.tolist() == [1.0, -0.25, 1.0]
    assert kept([1, 1, 1], params, prompt=[0, 0], output=[]).logits.tolist() == [1, 1, 1]
    for name in ("frequency_penalty", "presence_penalty"):
        for wrong in (-2.1, 2.1, math.inf):
            with pytest.raises(RequestError) as refused:
                SamplingParams(**{name: wrong})
            assert refused.value.param == name


@pytest.mark.parametrize("bias", [{"V": -100}, {"-1": 5}, {-1: 5}, {"abc": 1}, {"3": 1000}, {"3": None}, {3.5: 1}, [3]])
def test_sampling_logit_bias_validation(bias):
    engine = script.engine_of(script.Script([4]))
    if bias == {"V": -100}:
        bias = {str(script.CONFIG.vocab): -100}
    with pytest.raises(RequestError) as refused:
        engine.add([1], SamplingParams(logit_bias=bias))
    assert refused.value.param == "logit_bias"
    (after,) = engine.add([1], SamplingParams(max_tokens=2))
    script.finish(engine)
    assert after.output_ids == [4, 4]


def test_sampling_logit_bias_bans_and_forces():
    engine = script.engine_of(script.Script([3]))
    (banned,) = engine.add([1], SamplingParams(logit_bias={"3": -100}, max_tokens=20))
    script.finish(engine)
    assert len(banned.output_ids) == 20
    assert 3 not in banned.output_ids
    engine = script.engine_of(script.Script([4]))
    (forced,) = engine.add([1], SamplingParams(logit_bias={"3": 100}, max_tokens=20))
    script.finish(engine)
    assert forced.output_ids == [3] * 20


def test_sampling_n_greater_1_with_seed():
    def choices(n, **settings):
        engine = script.engine_of(script.Hash())
        made = engine.add(
            [1, 2, 3],
            SamplingParams(n=n, seed=7, temperature=1.5, max_tokens=12)
            if not settings
            else SamplingParams(n=n, max_tokens=12, **settings),
        )
        script.finish(engine)
        assert [sequence.index for sequence in made] == list(range(n))
        return [tuple(sequence.output_ids) for sequence in made]

    four = choices(4)
    assert len(set(four)) == 4
    assert choices(4) == four
    assert choices(1) == four[:1]
    assert len(set(choices(4, temperature=0))) == 1
    for wrong in (0, -1, True, 1.0, 1_000_000_000):
        with pytest.raises(RequestError) as refused:
            SamplingParams(n=wrong)
        assert refused.value.param == "n"


def test_sampling_min_p_definition():
    logits = np.log([0.6, 0.3, 0.08, 0.02])
    for shift in (0, 100):
        assert distribution(logits + shift, temperature=1, min_p=0.1) == pytest.approx(
            {0: 0.6122, 1: 0.3061, 2: 0.0816}, abs=1e-4
        )
    assert list(distribution(logits, temperature=1, min_p=1.0)) == [0]
    assert list(distribution([1.0, 1.0, 0.5], temperature=1, min_p=1.0)) == [0, 1]
    assert len(distribution(logits, temperature=1, min_p=0)) == 4
    for wrong in (-0.1, 1.1):
        with pytest.raises(RequestError) as refused:
            SamplingParams(min_p=wrong)
        assert refused.value.param == "min_p"


def test_sampling_min_p_comes_after_temperature():
    # p = .6 and .05: at temperature 1 the second is 1/12 of the first, at temperature 2 it is 1/sqrt(12) of it.
    logits = np.log([0.6, 0.05])
    assert list(distribution(logits, temperature=1, min_p=0.1)) == [0]
    assert list(distribution(logits, temperature=2, min_p=0.1)) == [0, 1]
