"""The llama.cpp dialect against llama.cpp's own samplers, as `dump_llama_sampling.py` saved what they left.

llama.cpp computes in float32 and sorts with an unstable sort, Cutaway in float64 with ties by lowest id. So two things
are llama.cpp's own affair, and the test takes either answer: which of several equal logits stays at a filter's lower
border (how many stay is compared), and a border that lies within float32 rounding of a candidate (which must be rare).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from llama_cases import HALF, SAVED, SHOWN, Case, cases

from cutaway.engine.sampling import SamplingParams
from cutaway.engine.stages import Candidates, History

ROUNDING = 1e-5  # of top-p's and min-p's border, in parts of it


@dataclass(frozen=True)
class Left:
    """What llama.cpp left of a case."""

    kept: np.ndarray  # ids, rising
    shown: np.ndarray  # ids, in its order if `in_order`
    p: np.ndarray
    in_order: bool


@pytest.fixture(scope="module")
def saved() -> list[tuple[Case, Left]]:
    with np.load(SAVED) as file:
        bits, shown, p, in_order, checksum = (file[k] for k in ("kept", "shown", "p", "sorted", "checksum"))
    found, start = [], 0
    for i, case in enumerate(cases()):
        assert case.checksum == checksum[i], f"case {i} is not the one that was saved: dump again"
        size = (len(case.logits) + 7) // 8
        kept = np.flatnonzero(np.unpackbits(bits[start : start + size], count=len(case.logits)))
        count = min(len(kept), SHOWN)
        found.append((case, Left(kept, shown[i, :count].astype(int), p[i, :count], bool(in_order[i]))))
        start += size
    assert (len(found), start) == (len(checksum), len(bits))
    return found


def ours(case: Case, dialect: str = "llama.cpp", **changed: float) -> Candidates:
    c = Candidates.of(case.logits)
    history = History(case.prompt, case.output)
    for _, stage in SamplingParams(dialect=dialect, **{**case.settings, **changed}).chain:
        c = stage(c, history)
    return c


def scores(case: Case) -> np.ndarray:
    """The logits after bias and penalties, float64 [vocab]."""
    return ours(case, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0).logits


def moved(case: Case, by: float) -> int:
    """How many are left when the borders of top-p and min-p move by this part of them."""
    top_p, min_p = case.settings.get("top_p", 1.0), case.settings.get("min_p", 0.0)
    changed = {"top_p": top_p if top_p == 1 else min(top_p * (1 + by), 1.0), "min_p": min(min_p * (1 - by), 1.0)}
    return len(ours(case, **changed))


def same_support(case: Case, found: Candidates, left: Left) -> bool:
    """As many are left; by score the same; and the same ids, but for those that tie with the lowest."""
    if len(found) != len(left.kept):
        return False
    x = scores(case).astype(np.float32)
    a, b = np.sort(x[found.ids]), np.sort(x[left.kept])
    if not np.array_equal(a, b):
        return False
    return set(found.ids[x[found.ids] > a[0]].tolist()) == set(left.kept[x[left.kept] > a[0]].tolist())


def test_the_same_candidates_are_left(saved: list[tuple[Case, Left]]) -> None:
    rounded = filtered = 0
    for i, (case, left) in enumerate(saved):
        found = ours(case)
        if not same_support(case, found, left):
            fewest, most = moved(case, -ROUNDING), moved(case, ROUNDING)
            assert fewest < most, (i, case.kind, case.settings, len(found), len(left.kept))
            assert fewest <= len(left.kept) <= most, (i, case.kind, case.settings, len(found), len(left.kept))
            rounded += 1
        filtered += len(left.kept) < len(case.logits)
    assert rounded <= len(saved) / 50
    assert filtered > len(saved) / 2


def test_a_border_met_exactly_is_reached(saved: list[tuple[Case, Left]]) -> None:
    """Where float32 has no say: the sum of probabilities that equals top-p is enough, on both sides."""
    exact = [(c, left) for c, left in saved if c.kind == "flat" and len(c.logits) == 32 and c.settings == HALF]
    assert exact
    for case, left in exact:
        assert len(ours(case)) == len(left.kept) == 16


def test_where_nothing_is_sorted_ties_go_to_the_lowest_id(saved: list[tuple[Case, Left]]) -> None:
    """Then llama.cpp is as definite as Cutaway: greedy takes the first, and min-p keeps all that are equal."""
    greedy = 0
    for i, (case, left) in enumerate(saved):
        if not left.in_order:
            assert np.array_equal(np.sort(ours(case).ids), left.kept), (i, case.kind, case.settings)
            greedy += case.settings["temperature"] == 0
    assert greedy > 50


def test_in_the_same_order(saved: list[tuple[Case, Left]]) -> None:
    """Falling scores, as Cutaway's own; among equal ones theirs may stand in any order."""
    compared = 0
    for i, (case, left) in enumerate(saved):
        if left.in_order:
            x = scores(case).astype(np.float32)[left.shown]
            assert (x[:-1] >= x[1:]).all(), (i, case.kind, case.settings)
            compared += len(x) > 1
    assert compared > len(saved) / 5


def test_the_same_probabilities(saved: list[tuple[Case, Left]]) -> None:
    compared = 0
    for i, (case, left) in enumerate(saved):
        found = ours(case)
        if len(found) != len(left.kept):
            continue  # rounding moved a border: see above
        # By place in falling order, not by id: of equal ones at the border others may have stayed.
        expected = np.zeros(len(case.logits))
        expected[found.ids] = found.probabilities
        tied_away = np.setdiff1d(left.kept, found.ids)
        expected[tied_away] = found.probabilities.min()
        np.testing.assert_allclose(
            left.p, expected[left.shown], rtol=2e-5, atol=1e-30, err_msg=f"{i} {case.kind} {case.settings}"
        )
        compared += len(found) > 1
    assert compared > len(saved) / 3


@pytest.mark.parametrize("dialect", ["cutaway", "hf", "vllm", "mlx"])
def test_other_dialects_leave_others(saved: list[tuple[Case, Left]], dialect: str) -> None:
    """The saved cases can tell the dialects apart."""
    differing = 0
    for case, left in saved:
        differing += not same_support(case, ours(case, dialect), left)
    assert differing > 20
