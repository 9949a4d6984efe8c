"""The dialects against cases worked out by hand, each with the rule it shows; llama.cpp against its own test tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import script

from cutaway.engine import stages as s
from cutaway.engine.dialects import DIALECTS, LLAMA_WINDOW, MLX_WINDOW, check_dialect
from cutaway.engine.sampling import SamplingParams
from cutaway.engine.stages import Candidates, History
from cutaway.errors import RequestError


def left(logits, dialect, prompt=(), output=(), **settings) -> Candidates:
    params = SamplingParams(dialect=dialect, **{"temperature": 1.0, **settings})
    c = Candidates.of(np.array(logits, np.float64))
    for _, stage in params.chain:
        c = stage(c, History(prompt, output))
    return c


def distribution(logits, dialect, **settings) -> dict[int, float]:
    c = left(logits, dialect, **settings)
    return dict(zip(c.ids.tolist(), c.probabilities.tolist(), strict=True))


def shares(*parts: float) -> list[float]:
    return [part / sum(parts) for part in parts]


# -- the rules that tell the dialects apart ---------------------------------------------------------------------------

P = [0.5, 0.25, 0.15, 0.1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_off_is_the_model_itself(dialect):
    assert distribution(np.log(P), dialect) == pytest.approx(dict(enumerate(P)))
    assert [name for name, _ in SamplingParams(temperature=1, dialect=dialect).chain] == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_temperature_zero_is_greedy_after_the_penalties(dialect):
    assert list(distribution(np.log(P), dialect, temperature=0)) == [0]
    assert list(distribution([2.0, 1.9, 0], dialect, temperature=0, repetition_penalty=2.0, prompt=[0])) == [1]
    assert list(distribution([1.0, 3.0, 3.0], dialect, temperature=0)) == [1]


@pytest.mark.parametrize(
    ("dialect", "kept"),
    [
        ("cutaway", 2),  # T=0.5 squares: .25 .0625 .0225 .01; a tenth of the best is .025
        ("hf", 2),
        ("vllm", 2),
        ("llama.cpp", 4),  # before temperature: a tenth of the best is .05
        ("mlx", 4),
    ],
)
def test_min_p_before_or_after_temperature(dialect, kept):
    found = distribution(np.log(P), dialect, temperature=0.5, min_p=0.1)
    assert list(found.values()) == pytest.approx(shares(*[0.25, 0.0625, 0.0225, 0.01][:kept]))


@pytest.mark.parametrize(
    ("dialect", "kept"),
    [
        ("cutaway", 3),  # T=2 takes roots: .316 .224 .173 .142 (normalised .37 .26 .20 .17): .63 < .7, so a third
        ("hf", 3),
        ("vllm", 3),
        ("llama.cpp", 2),  # before temperature .5 + .25 reaches .7
        ("mlx", 2),
    ],
)
def test_top_p_before_or_after_temperature(dialect, kept):
    found = distribution(np.log(P), dialect, temperature=2.0, top_p=0.7)
    assert list(found.values()) == pytest.approx(shares(*np.sqrt(P)[:kept]))


@pytest.mark.parametrize(
    ("dialect", "kept"),
    [
        ("cutaway", [0]),  # top-k 3 first: .5/.9 = .56 reaches .55 alone
        ("hf", [0]),
        ("vllm", [0]),
        ("llama.cpp", [0]),
        ("mlx", [0, 1]),  # top-p first: .5 does not reach .55; then top-k keeps both
    ],
)
def test_top_k_before_or_after_top_p(dialect, kept):
    assert sorted(distribution(np.log(P), dialect, top_k=3, top_p=0.55)) == kept


def test_vllm_min_p_comes_before_top_p():
    # min-p 0.3 leaves .5 .25 .16, of which the first has .5 / .91 = .549: enough for .52, as .5 of 1 is not
    p = [0.5, 0.25, 0.16, 0.09]
    assert sorted(distribution(np.log(p), "vllm", min_p=0.3, top_p=0.52)) == [0]
    assert sorted(distribution(np.log(p), "hf", min_p=0.3, top_p=0.52)) == [0, 1]


@pytest.mark.parametrize(("dialect", "kept"), [("cutaway", 2), ("hf", 3), ("vllm", 3), ("llama.cpp", 2), ("mlx", 2)])
def test_top_k_ties(dialect, kept):
    found = sorted(distribution([1.0, 1.0, 0.0, 1.0], dialect, top_k=2))
    assert found == [0, 1, 3][:kept]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_top_p_ties(dialect):
    """The second of .4 .2 .2 .2 crosses .5; of the equal ones the lowest id stays."""
    assert sorted(distribution(np.log([0.4, 0.2, 0.2, 0.2]), dialect, top_p=0.5)) == [0, 1]


@pytest.mark.parametrize("dialect", ["cutaway", "hf", "llama.cpp"])
def test_top_p_zero_keeps_one(dialect):
    assert list(distribution(np.log(P), dialect, top_p=0)) == [0]


def test_top_p_zero_in_mlx_is_off():
    assert len(distribution(np.log(P), "mlx", top_p=0)) == 4


def test_penalty_windows():
    old = [0] + [1] * 200
    for dialect, window in (("llama.cpp", LLAMA_WINDOW), ("mlx", MLX_WINDOW)):
        inside, outside = [0] + [1] * (window - 1), [0] + [1] * window
        for prompt, changed in ((inside, True), (outside, False)):
            logits = left([4.0, 4.0, 4.0], dialect, repetition_penalty=2.0, prompt=prompt).logits
            assert logits.tolist() == [2.0 if changed else 4.0, 2.0, 4.0]
            # prompt and output are one history, and the window slides over both
            split = left([4.0, 4.0, 4.0], dialect, repetition_penalty=2.0, prompt=prompt[:5], output=prompt[5:]).logits
            assert split.tolist() == logits.tolist()
    for dialect in ("cutaway", "hf", "vllm"):
        assert left([4.0, 4.0, 4.0], dialect, repetition_penalty=2.0, prompt=old).logits.tolist() == [2.0, 2.0, 4.0]


def test_who_counts_the_prompt():
    for dialect, expected in (("cutaway", 0.0), ("vllm", 0.0), ("llama.cpp", -1.0), ("mlx", -1.0)):
        found = left([0.0, 0.0], dialect, frequency_penalty=0.5, prompt=[0, 0], output=[1, 1, 1])
        assert found.logits.tolist() == [expected, -1.5]


def test_penalties_of_mlx_by_hand():
    # repetition on all of the window, then presence once an id, then frequency an occurrence (mlx-lm sample_utils)
    found = left(
        [2.0, -1.0, 1.0], "mlx", repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, output=[0, 1, 1]
    )
    assert found.logits.tolist() == [1.0 - 0.5 - 0.25, -2.0 - 0.5 - 0.5, 1.0]


def test_penalties_of_vllm_by_hand():
    found = left(
        [2.0, -1.0, 1.0],
        "vllm",
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        prompt=[0],
        output=[1, 1],
    )
    assert found.logits.tolist() == [1.0, -2.0 - 0.5 - 0.5, 1.0]


def test_vllm_raises_a_small_temperature():
    cold = left([1.0, 0.99, 0.0], "vllm", temperature=0.001)
    assert cold.logits.tolist() == pytest.approx([0.0, -1.0, -100.0])


def test_what_a_dialect_refuses():
    for settings, param in (
        ({"dialect": "hf", "presence_penalty": 0.1}, "presence_penalty"),
        ({"dialect": "hf", "frequency_penalty": 0.1}, "frequency_penalty"),
        ({"dialect": "vllm", "temperature": 2.5}, "temperature"),
        ({"dialect": "vllm", "temperature": 1, "top_p": 0}, "top_p"),
        ({"dialect": "mlx", "temperature": 1, "top_k": 97}, "top_k"),
    ):
        with pytest.raises(RequestError) as refused:
            script.engine_of(script.Script([1])).add([1], SamplingParams(**settings))
        assert refused.value.param == param
        own = {**settings, "dialect": "cutaway"}
        check_dialect(SamplingParams(**own), 97)


# -- llama.cpp: the tables of its tests/test-sampling.cpp, whose rows are probabilities ------------------------------

FOUR = [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ({"temperature": 0.0}, {3: 1.0}),
        ({"top_k": 1}, {3: 1.0}),
        ({"top_k": 3}, {3: 0.44444, 2: 0.33333, 1: 0.22222}),
        ({"top_k": 4}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ({"top_k": 0}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ({"top_p": 0.0}, {3: 1.0}),
        ({"top_p": 0.7}, {3: 0.571429, 2: 0.428571}),
        ({"top_p": 0.8}, {3: 0.44444, 2: 0.33333, 1: 0.22222}),
        ({"top_p": 1.0}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ({"min_p": 0.0}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ({"min_p": 0.24}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ({"min_p": 0.26}, {1: 0.2 / 0.9, 2: 0.3 / 0.9, 3: 0.4 / 0.9}),
        ({"min_p": 0.49}, {1: 0.2 / 0.9, 2: 0.3 / 0.9, 3: 0.4 / 0.9}),
        ({"min_p": 0.51}, {2: 0.3 / 0.7, 3: 0.4 / 0.7}),
        ({"min_p": 0.74}, {2: 0.3 / 0.7, 3: 0.4 / 0.7}),
        ({"min_p": 0.76}, {3: 1.0}),
        ({"min_p": 1.0}, {3: 1.0}),
    ],
)
def test_llama_cpp_filters(settings, expected):
    found = distribution(np.log(np.array(FOUR, np.float32)), "llama.cpp", **settings)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("last", "expected", "repeat", "frequency", "presence"),
    [
        ([0], [0, 0.25, 0.25, 0.25, 0.25], 50.0, 0.0, 0.0),
        ([0, 1, 2], [0, 0, 0, 0.5, 0.5], 50.0, 0.0, 0.0),
        ([0, 1, 2, 0, 0], [0, 0, 0, 0.5, 0.5], 50.0, 0.0, 0.0),
        ([0], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997], 1.0, 5.0, 5.0),
        ([0, 1, 2], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966], 1.0, 5.0, 5.0),
        ([0, 1, 2, 0, 0], [0.000000, 0.000023, 0.000023, 0.499977, 0.499977], 1.0, 5.0, 5.0),
    ],
)
def test_llama_cpp_penalties(last, expected, repeat, frequency, presence):
    # Penalties of 5 are past what a request may ask for, so the stages are called as the chain calls them.
    c = Candidates.of(np.log(np.full(5, 0.2, np.float32)))
    seen, counts = History(last[:2], last[2:]).last_counts(64)
    c = s.penalise_counts(s.penalise_repetition(c, seen, repeat), seen, counts, presence, frequency)
    assert c.probabilities == pytest.approx(expected, abs=1e-5)


QUEUE = [
    ("k", 10000, 1.0, 1.0),
    ("k", 1, 1.0, 1.0),
    ("p", 10000, 1.0, 1.0),
    ("p", 10000, 0.0, 1.0),
    ("m", 10000, 1.0, 1.0),
    ("k", 100, 1.0, 1.0),
    ("p", 10000, 0.0003, 1.0),
    ("p", 10000, 0.8, 1.0),
    ("m", 10000, 1.0, 9997.9 / 9999),
    ("m", 10000, 1.0, 0.1),
    ("mp", 100, 0.8, 9997.9 / 9999),
    *(
        (order, 100, 0.8, 0.1)
        for order in ("kp", "km", "pk", "pm", "mk", "mp", "kpm", "kmp", "pkm", "pmk", "mkp", "mpk")
    ),
]


@pytest.mark.parametrize(("order", "k", "p", "m"), QUEUE)
def test_llama_cpp_queues_of_filters(order, k, p, m):
    """10,000 tokens, the probability of each in proportion to its id; after every filter, which are left."""
    vocab = 10_000
    with np.errstate(divide="ignore"):
        c = Candidates.of(np.log(np.arange(vocab, dtype=np.float64)))
    lowest = 0
    for letter in order:
        if letter == "k":
            c = s.top_k(c, k)
            lowest = max(lowest, vocab - k)
        elif letter == "p":
            c = s.top_p(c, p) if p < 1 else c
            mass = sum(range(lowest, vocab))
            target, reached, lowest = math.ceil(p * mass), 0, vocab
            while True:
                lowest -= 1
                reached += lowest
                if reached >= target:
                    break
            if lowest == 1:  # the last one weighs nothing
                lowest = 0
        else:
            c = s.min_p(c, m)
            lowest = max(lowest, min(math.ceil(m * (vocab - 1)), vocab - 1))
        assert sorted(c.ids.tolist()) == list(range(lowest, vocab)), (order, letter)
