"""The sampling room: settings, the random number, the stages one by one, the draw, and the record of a step."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import script
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engine import stages as s
from cutaway.engine.sampling import SamplingParams, _philox, candidates, draw_token, uniform
from cutaway.engine.stages import Candidates, History
from cutaway.errors import RequestError
from cutaway.forward.program import TopLogits

NOTHING = History((), ())
RNG = np.random.default_rng(5)


def rows(vocab: int, count: int, ties: bool) -> np.ndarray:
    logits = RNG.normal(0, 3, (count, vocab)).astype(np.float32)
    return np.round(logits) if ties else logits


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("temperature", wrong) for wrong in (-1, math.nan, math.inf, "hot", None, True, [0.7])),
        *((param, wrong) for param in ("top_p", "min_p") for wrong in (-0.01, 1.01, math.nan, "x", False)),
        *(("repetition_penalty", wrong) for wrong in (0, -1, math.nan, math.inf, "1")),
        *(("seed", wrong) for wrong in (1.5, "1", True, 2**64, -(2**63) - 1)),
        *(("max_tokens", wrong) for wrong in (-1, 2.0, "10", True)),
        *(("stop", wrong) for wrong in ("", [""], [1], 5, ["x"] * 100)),
        *(("stop_token_ids", wrong) for wrong in ([-1], ["a"], [1.5], 5, "ab", [True])),
        *(("ignore_eos", wrong) for wrong in (1, "yes", None)),
        *(("logprobs", wrong) for wrong in (-1, 21, True, 1.0)),
        *(("dialect", wrong) for wrong in ("openai", "", None)),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {True: 1.0}),
    ],
)
def test_a_wrong_setting_is_refused_by_name(param, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{param: value})
    assert refused.value.param == param
    assert param in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_are_settled():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop="END", stop_token_ids=[np.int32(4)], logit_bias={"7": 1}
    )
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 3, ("END",), (4,))
    assert params.logit_bias == {7: 1.0}
    assert replace(params, n=2).logit_bias == {7: 1.0}
    assert asdict(params)["stop"] == ("END",)
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ({}, 1),
        ({"top_k": 40}, 1),
        ({"temperature": 1, "top_k": 40}, 40),
        ({"temperature": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.1}, 40),
        ({"temperature": 1}, None),
        ({"temperature": 1, "top_k": 5000}, None),
        ({"logprobs": 0}, None),
        ({"logit_bias": {1: 1}}, None),
        ({"repetition_penalty": 1.1}, None),
        ({"presence_penalty": 0.1}, None),
        ({"frequency_penalty": 0.1}, None),
        ({"temperature": 1, "top_k": 40, "dialect": "hf"}, None),
        ({"dialect": "mlx"}, 1),
    ],
)
def test_how_many_logits_are_enough(settings, k):
    assert SamplingParams(**settings).head_top_k == k


# -- the random number ------------------------------------------------------------------------------------------------


def test_philox_known_answers():
    """The vectors published with the generator (Random123, kat_vectors, philox4x32 10)."""
    assert _philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    full = 0xFFFFFFFF
    assert _philox((full,) * 4, (full,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert _philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_a_function_of_its_key():
    numbers = [
        uniform(seed, index, position) for seed in (0, 1, -1, 2**40) for index in (0, 1) for position in range(500)
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert abs(np.var(numbers) - 1 / 12) < 0.005
    assert uniform(3, 1, 7) == uniform(3, 1, 7)


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 5000])
def test_top_k_is_exact_and_ties_go_to_the_lowest_ids(vocab, ties):
    for logits in rows(vocab, 5, ties):
        order = sorted(range(vocab), key=lambda i: (-logits[i], i))
        for k in (1, 2, 5, 63, vocab - 1, vocab, vocab + 1):
            if k < 1:
                continue
            found = s.top_k(Candidates.of(logits), k)
            assert sorted(found.ids.tolist()) == sorted(order[:k])
            if k < vocab:
                assert found.ids.tolist() == order[:k]
            with_ties = s.top_k_with_ties(Candidates.of(logits), k)
            last = logits[order[min(k, vocab) - 1]]
            assert with_ties.ids.tolist() == [i for i in range(vocab) if k >= vocab or logits[i] >= last]


def plain_top_p(x: np.ndarray, p: float) -> tuple[list[int], bytes]:
    """Ids and weights, by sorting everything. The sum is compared in the same way: next to 1, rounding decides."""
    order = np.lexsort((np.arange(len(x)), -x))
    weights = np.exp(x - x.max())
    reached = np.cumsum(weights[order]) >= p * weights.sum()
    kept = order[: int(reached.argmax()) + 1] if reached.any() else order
    return kept.tolist(), weights[kept].tobytes()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 65, 3000, 40_000])
@pytest.mark.parametrize("spread", [0, 0.01, 1, 3, "peaked"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_p_is_the_sorted_definition(vocab, ties, spread, dtype):
    for logits in rows(vocab, 3, ties).astype(dtype):
        if spread == "peaked":
            logits[vocab // 2] += 20
        else:
            logits *= dtype(spread)
        x = logits.astype(np.float64)
        for p in (0.0, 0.1, 0.5, 0.9, 0.999, 0.999999, 1 - 2**-53):
            found = s.top_p(Candidates.of(logits), p)
            assert (found.ids.tolist(), found.weights.tobytes()) == plain_top_p(x, p)
            found = s.top_p(s.temperature(Candidates.of(logits), 0.7), p)
            assert (found.ids.tolist(), found.weights.tobytes()) == plain_top_p((x - x.max()) / 0.7, p)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ties", [False, True])
def test_many_values_are_sorted_as_few_are(dtype, ties):
    for count in (1, 2, 1023, 1024, 5000):
        x = RNG.normal(0, 3, count).astype(dtype) * dtype(10) ** RNG.integers(-30, 30, count).astype(dtype)
        if ties:
            x = np.round(x)  # most of them to 0 or -0.0
            x[RNG.random(count) < 0.1] = -np.inf
        assert s._falling(x).tolist() == sorted(range(count), key=lambda i: (-x[i], i))


def test_a_temperature_that_waits_gives_the_same_bits():
    for logits in rows(3000, 5, ties=True):
        x = logits.astype(np.float64)
        for t in (0.3, 0.8, 1.7):
            expected = (x - x.max()) / t
            c = s.temperature(Candidates.of(logits), t)
            kept = s.top_k(c, 100)
            assert kept.logits.tobytes() == expected[kept.ids].tobytes()
            assert c.logits.tobytes() == expected.tobytes()
            assert (c.peak, kept.peak) == (0, 0)
            assert s.temperature(c, 0.5).logits.tobytes() == (expected / 0.5).tobytes()


@pytest.mark.parametrize(
    "settings", [{"top_k": 7}, {"top_k": 40, "top_p": 0.7}, {"top_k": 40, "min_p": 0.2}, {"top_k": 1}]
)
def test_a_partial_head_gives_the_same_bits(settings):
    """Law 3: what a neighbour needs changes which logits the sampler sees, and nothing else."""
    params = SamplingParams(temperature=0.7, **settings)
    for logits in rows(1000, 30, ties=True):
        full = candidates(logits[None], 0)
        seen = []
        for k in (params.top_k, params.top_k + 3, 200):
            part = script.top(logits[None], k)
            assert isinstance(part, TopLogits)
            seen.append(candidates(part, 0))
        for c in seen:
            a, b = full, c
            for _, stage in params.chain:
                a, b = stage(a, NOTHING), stage(b, NOTHING)
            assert a.ids.tolist() == b.ids.tolist()
            assert a.probabilities.tobytes() == b.probabilities.tobytes()


def test_a_tiny_temperature_is_no_overflow():
    for t in (5e-324, 1e-308, 1e-10, 1e10):
        c = s.temperature(Candidates.of(np.array([5, 88, -3], np.float32)), t)
        assert np.isfinite(c.probabilities).all()
    assert s.temperature(Candidates.of(np.array([5, 88, -3], np.float32)), 1e-308).probabilities.tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [[math.nan, 1], [1, math.nan], [-math.inf, -math.inf], [math.inf, 1]])
def test_logits_that_are_no_distribution(bad):
    with pytest.raises(RequestError, match="no distribution"):
        candidates(np.array([bad], np.float32), 0)


def test_a_banned_token_is_never_drawn():
    logits = np.array([[-np.inf, 0, -np.inf, 0, -np.inf]], np.float32)
    params = SamplingParams(temperature=1)
    drawn = {
        draw_token(candidates(logits, 0), params, NOTHING, seed=seed, index=0, position=0, record=False).token
        for seed in range(60)
    }
    assert drawn == {1, 3}
    c = candidates(logits, 0)
    assert c.entropy_nats == pytest.approx(math.log(2))


# -- the draw ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([1, 100, 1500]),
)
def test_pick_is_the_inverse_of_the_cumulative_distribution(values, u, repeat):
    c = Candidates.of(np.array(values * repeat, np.float32))
    place, before = s.pick(c, u)
    mass = c.probabilities
    assert mass[place] > 0
    assert before <= u + 1e-9
    assert u < before + mass[place] + 1e-9
    assert before == pytest.approx(math.fsum(mass[:place]), abs=1e-9)


def test_pick_at_the_very_end_of_the_line():
    last = 1 - 2**-53
    for c in (
        Candidates.of(np.full(3, 0.1, np.float32)),
        Candidates.of(np.array([0] * 2000 + [-np.inf] * 5000, np.float32)),
    ):
        place, _ = s.pick(c, last)
        assert c.weights[place] > 0
        assert place == np.flatnonzero(c.weights)[-1]


def test_draws_follow_the_distribution():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    params = SamplingParams(temperature=1)
    counts = np.zeros(4)
    for position in range(4000):
        token = draw_token(
            candidates(logits, 0), params, NOTHING, seed=3, index=0, position=position, record=False
        ).token
        counts[token] += 1
    assert np.abs(counts / 4000 - [0.5, 0.25, 0.125, 0.125]).max() < 0.02
