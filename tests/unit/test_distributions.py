"""Logits to log-probabilities, ranks, entropy and divergence: against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cutaway.experiments import distributions
from cutaway.experiments.distributions import divergences, log_softmax, logprobs_of, token_statistics, top_candidates

HALVES = np.log(np.array([[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]], dtype=np.float32))


@pytest.fixture(params=[1 << 21, 4], ids=["one block", "a row a block"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "_VALUES_AT_ONCE", request.param)


def test_log_softmax_does_not_overflow() -> None:
    found = log_softmax(np.array([[3000.0, 3000.0, -3000.0]], dtype=np.float32))
    np.testing.assert_allclose(found[0, :2], -math.log(2), rtol=1e-12)
    assert found[0, 2] == pytest.approx(-6000 - math.log(2))


@pytest.mark.usefixtures("block_size")
def test_token_statistics() -> None:
    found = token_statistics(HALVES, np.array([1, 1]))
    np.testing.assert_allclose(found.logprob, np.log([0.25, 0.125]), rtol=1e-6)
    assert found.rank.tolist() == [2, 4]  # the second row: 3 and 2 lie above, 0 ties and has the lower id
    assert found.best.tolist() == [0, 3]
    np.testing.assert_allclose(found.best_logprob, math.log(0.5), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, 1.75 * math.log(2), rtol=1e-6)


@pytest.mark.usefixtures("block_size")
def test_logprobs_of_fixed_ids() -> None:
    np.testing.assert_allclose(np.exp(logprobs_of(HALVES, [3, 0])), [[0.125, 0.5], [0.5, 0.125]], rtol=1e-6)


@pytest.mark.usefixtures("block_size")
def test_top_candidates_break_ties_by_id() -> None:
    ids, logprobs = top_candidates(HALVES, 3)
    assert ids.tolist() == [[0, 1, 2], [3, 2, 0]]
    np.testing.assert_allclose(np.exp(logprobs), [[0.5, 0.25, 0.125]] * 2, rtol=1e-6)
    assert top_candidates(HALVES, 99)[0].shape == (2, 4)


@pytest.mark.usefixtures("block_size")
def test_divergence() -> None:
    p, q = HALVES[:1], np.log(np.full((1, 4), 0.25, dtype=np.float32))
    assert divergences(p, q)[0] == pytest.approx(0.25 * math.log(2), rel=1e-6)  # ln 4 - entropy
    assert divergences(q, p)[0] == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert divergences(p, p)[0] == 0.0
    both = divergences(HALVES, HALVES[::-1])
    np.testing.assert_allclose(both, math.log(2) * (0.5 * 2 + 0.25 * 1 - 0.125 * 1 - 0.125 * 2), rtol=1e-6)


def test_divergence_of_padded_vocabularies_is_over_the_shared_ids() -> None:
    padded = np.concatenate([HALVES, np.full((2, 3), -20.0, dtype=np.float32)], axis=1)
    np.testing.assert_array_equal(divergences(padded, HALVES), 0.0)
