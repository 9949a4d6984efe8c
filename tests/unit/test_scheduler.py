"""The scheduler: what goes into a step, who has to give way, and books that balance whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
import script
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engine.engine import Engine
from cutaway.engine.sampling import SamplingParams
from cutaway.engine.sequence import FinishReason, Phase, build_batch

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def plan(engine: Engine) -> list[tuple[int, int]]:
    """The next step as (sequence number, tokens), taken."""
    batch = engine.scheduler.schedule()
    assert batch is not None
    taken = [(s.number, int(n)) for s, n in zip(batch.sequences, np.diff(batch.query_starts), strict=True)]
    engine.scheduler.commit(batch, [5] * len(batch.sampled))
    return taken


def test_decode_first_then_prompts_by_chunks():
    engine = script.engine_of(script.Script([5]), chunk=8, prefix_cache=False)
    engine.add([1] * 3, LONG)
    assert plan(engine) == [(0, 3)]
    engine.add([2] * 12, LONG)
    engine.add([3] * 4, LONG)
    assert plan(engine) == [(0, 1), (1, 7)]
    assert plan(engine) == [(0, 1), (1, 5), (2, 2)]
    assert plan(engine) == [(0, 1), (1, 1), (2, 2)]
    assert plan(engine) == [(0, 1), (1, 1), (2, 1)]


def test_prompts_move_however_many_sequences_decode():
    engine = script.engine_of(script.Script([5]), chunk=1, prefix_cache=False, num_blocks=64)
    for _ in range(3):
        engine.add([1], LONG)
        plan(engine)
    engine.add([2] * 3, LONG)
    assert [plan(engine)[-1] for _ in range(3)] == [(3, 1)] * 3


def test_a_batch_says_where_everything_lies():
    engine = script.engine_of(script.Script([5]), prefix_cache=False, num_blocks=32)
    (first,) = engine.add([7, 8, 9, 10, 11], LONG)
    plan(engine)
    (second,) = engine.add([21, 22], LONG)
    batch = engine.scheduler.schedule()
    assert batch.token_ids.tolist() == [5, 21, 22]
    assert batch.positions.tolist() == [5, 0, 1]
    assert batch.query_starts.tolist() == [0, 1, 3]
    assert batch.context_lengths.tolist() == [6, 2]
    assert batch.output_rows.tolist() == [0, 2]
    assert batch.block_tables.tolist() == [first.blocks, [*second.blocks, -1]]
    assert batch.slots.tolist() == [first.blocks[1] * 4 + 1, second.blocks[0] * 4, second.blocks[0] * 4 + 1]
    assert batch.sampled == (first, second)
    assert batch.params == (LONG, LONG)
    assert {array.dtype for array in (batch.token_ids, batch.positions, batch.slots, batch.output_rows)} == {
        np.dtype(np.int32)
    }
    with pytest.raises(AttributeError):
        batch.head_top_k = 3


@pytest.mark.parametrize(
    ("wanted", "k"),
    [([{}], 1), ([{}, {"temperature": 1, "top_k": 7}], 7), ([{}, {"temperature": 1}], None), ([{"logprobs": 1}], None)],
)
def test_the_head_gives_what_the_neediest_needs(wanted, k):
    engine = script.engine_of(script.Script([5]), num_blocks=64)
    for one in wanted:
        engine.add([1, 2], SamplingParams(**one))
    assert engine.scheduler.schedule().head_top_k == k
    assert build_batch([(engine.add([1], SamplingParams(), record=True)[0], 0)], 4).head_top_k is None


def test_blocks_run_out_and_the_youngest_gives_way():
    engine = script.engine_of(script.Script([5]), max_context=32, num_blocks=8, prefix_cache=False)
    old, young = engine.add([1] * 10, LONG)[0], engine.add([2] * 10, LONG)[0]
    plan(engine)
    while young.phase is not Phase.WAITING:
        engine.step()
    assert young.preemptions == 1
    assert (young.blocks, young.num_computed) == ([], 0)
    assert old.phase is Phase.DECODE
    before = list(young.output_ids)
    script.finish(engine)
    assert young.output_ids[: len(before)] == before
    assert (len(old.output_ids), len(young.output_ids)) == (22, 22)
    script.check_books(engine)


def test_what_is_computed_again_is_findable_again():
    engine = script.engine_of(script.Script([5]), num_blocks=64)
    (sequence,) = engine.add([1] * 9, LONG)
    plan(engine)
    engine.scheduler._suspend(sequence)
    engine.pool.clear()
    assert engine.pool.num_cached == 0
    plan(engine)
    assert engine.pool.num_cached == 2


def test_without_kv_cache_every_step_is_the_whole_sequence():
    interpreter = script.Hash()
    engine = script.engine_of(interpreter, kv_cache=False, chunk=4)
    (sequence,) = engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    work = []
    while engine.has_work:
        batch = engine.scheduler.schedule()
        work.append(batch.positions.tolist())
        engine.scheduler.commit(batch, [5] * len(batch.sampled))
        assert not batch.sampled or engine.pool.num_held == 0
    assert work == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [4], [0, 1, 2, 3], [4, 5]]
    assert sequence.preemptions == 0


def test_one_that_does_not_fit_holds_the_later_ones_back():
    engine = script.engine_of(script.Script([5]), max_context=32, num_blocks=8, prefix_cache=False)
    engine.add([1] * 20, LONG)
    plan(engine)
    big, small = engine.add([2] * 20, LONG)[0], engine.add([3], LONG)[0]
    assert plan(engine) == [(0, 1)]
    assert (big.phase, small.phase) == (Phase.WAITING, Phase.WAITING)
    assert not big.blocks


def test_an_admission_that_cannot_be_carried_out_changes_nothing():
    engine = script.engine_of(script.Script([5]), max_context=32, num_blocks=8)
    engine.add([1] * 20, LONG)
    plan(engine)
    (big,) = engine.add([1] * 16 + [2] * 12, LONG)  # its first 4 blocks can be found; the other 3 are not free
    pool = engine.pool
    before = (list(pool.references), list(pool._empty), list(pool._cached), list(pool._block_of))
    for _ in range(3):
        engine.scheduler._admit(100, share=True)
    assert (list(pool.references), list(pool._empty), list(pool._cached), list(pool._block_of)) == before
    assert (big.phase, big.blocks, big.num_computed) == (Phase.WAITING, [], 0)


def test_choices_wait_for_the_prompt_and_share_it():
    interpreter = script.Hash()
    engine = script.engine_of(interpreter, chunk=8, num_blocks=64)
    choices = engine.add(list(range(18)), SamplingParams(n=3, temperature=1, seed=1, max_tokens=3))
    script.finish(engine)
    assert [choice.cached_tokens for choice in choices] == [0, 16, 16]
    assert engine.stats.prompt_tokens == 18 + 2 + 2
    assert engine.stats.cached_tokens == 32
    # and it makes no difference to what they say
    engine = script.engine_of(script.Hash(), num_blocks=64, prefix_cache=False)
    alone = engine.add(list(range(18)), SamplingParams(n=3, temperature=1, seed=1, max_tokens=3))
    script.finish(engine)
    assert [c.output_ids for c in alone] == [c.output_ids for c in choices]
    assert engine.stats.cached_tokens == 0


PROMPTS = st.sampled_from(
    [(1,), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(range(20)), (9,) * 13, tuple(range(8))]
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, st.integers(1, 3), st.integers(0, 9)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("fail")),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    ACTIONS,
    st.sampled_from([1, 3, 8, 512]),
    st.sampled_from([8, 11, 40]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
)
def test_law_6_whatever_happens_the_books_balance(actions, chunk, num_blocks, prefix_cache, kv_cache, max_seqs):
    """Any mix of requests, cancellations and failing steps: every block comes back, every sequence ends with a reason,
    and each that was left in peace says what it says alone."""

    class Fragile(script.Hash):
        failing = False

        def run(self, batch, kv_cache, taps=None):
            if self.failing:
                raise RuntimeError("the kernel failed")
            return super().run(batch, kv_cache, taps)

    interpreter, live = Fragile(), []
    engine = script.engine_of(
        interpreter,
        max_context=32,
        chunk=chunk,
        num_blocks=num_blocks,
        prefix_cache=prefix_cache,
        kv_cache=kv_cache,
        max_seqs=max_seqs,
    )
    for action, *arguments in actions:
        if action == "add":
            prompt, n, seed = arguments
            live += engine.add(prompt, SamplingParams(n=n, temperature=1, seed=seed, max_tokens=7, top_k=20))
        elif action == "step":
            for _ in range(arguments[0]):
                engine.step()
        elif action == "cancel" and live:
            engine.cancel(live[arguments[0] % len(live)])
        elif action == "fail" and engine.has_work:
            interpreter.failing = True
            with pytest.raises(RuntimeError):
                engine.step()
            interpreter.failing = False
        script.check_books(engine, live)
        assert engine.scheduler.running == sorted(engine.scheduler.running, key=lambda s: s.number)
        assert len(engine.scheduler.running) <= max_seqs
    script.finish(engine)
    script.check_books(engine, live)
    assert engine.pool.num_held == 0
    for sequence in live:
        assert sequence.phase is Phase.FINISHED
        if sequence.finish_reason is FinishReason.LENGTH:
            assert sequence.output_ids == alone(sequence.prompt_ids, sequence.seed, sequence.index)
        else:
            assert sequence.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)


SOLO: dict = {}


def alone(prompt, seed, index):
    if (prompt, seed) not in SOLO:
        engine = script.engine_of(script.Hash(), max_context=32, num_blocks=100, prefix_cache=False)
        made = engine.add(prompt, SamplingParams(n=3, temperature=1, seed=seed, max_tokens=7, top_k=20))
        script.finish(engine)
        SOLO[prompt, seed] = [sequence.output_ids for sequence in made]
    return SOLO[prompt, seed][index]
