"""Who holds which block: every block is in one place, and what the prefix cache finds is what was published."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engine.blocks import BlockPool, chain_digest


def digests(*blocks):
    chain, parent = [], b""
    for block in blocks:
        parent = chain_digest(parent, block)
        chain.append(parent)
    return chain


def test_a_digest_is_of_everything_before():
    (a, ab), (b, bb) = digests([1, 2], [3, 4]), digests([9, 9], [3, 4])
    assert len({a, ab, b, bb}) == 4
    assert digests([1, 2], [3, 4]) == [a, ab]
    assert digests([1, 2, 3, 4])[0] not in (a, ab)
    assert len(a) == 16


def test_allocate_is_all_or_nothing():
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    assert (pool.num_free, pool.num_held) == (1, 2)
    pool.release(held)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_block_released_twice_is_a_fault_of_ours():
    pool = BlockPool(2, 4)
    held = pool.allocate(1)
    pool.release(held)
    with pytest.raises(AssertionError):
        pool.release(held)


def test_found_blocks_are_shared_and_counted():
    pool = BlockPool(4, 2)
    chain = digests([1, 2], [3, 4])
    held = pool.allocate(2)
    for block, digest in zip(held, chain, strict=True):
        pool.publish(block, digest)
    assert pool.find(chain) == held
    assert pool.find([*chain, b"other"]) == held
    assert pool.find([b"other", *chain]) == []
    pool.hold(held)
    assert pool.freed_by(held) == 0
    pool.release(held)
    assert pool.freed_by(held) == 2
    pool.release(held)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.find(chain) == held


def test_empty_blocks_go_first_then_the_least_recently_used_and_a_tail_before_its_prefix():
    pool = BlockPool(4, 2)
    old, new = digests([1, 2], [3, 4]), digests([7, 8])
    for chain in (old, new):
        held = pool.allocate(len(chain))
        for block, digest in zip(held, chain, strict=True):
            pool.publish(block, digest)
        pool.release(held)
    pool.allocate(1)
    assert (pool.find(old), len(pool.find(new))) == ([0, 1], 1)
    pool.allocate(1)
    assert (pool.find(old), len(pool.find(new))) == ([0], 1)
    pool.allocate(1)
    assert (pool.find(old), len(pool.find(new))) == ([], 1)


def test_the_first_of_two_equal_blocks_stays_the_findable_one():
    pool = BlockPool(4, 2)
    (digest,) = digests([1, 2])
    first, second = pool.allocate(2)
    pool.publish(first, digest)
    pool.publish(second, digest)
    assert pool.find([digest]) == [first]
    pool.release([second])
    assert pool.find([digest]) == [first]
    assert pool.num_cached == 1


def test_off_finds_nothing():
    pool = BlockPool(2, 2, prefix_cache=False)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    assert pool.find([b"x"]) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_every_block_is_in_one_place(actions):
    pool, held = BlockPool(6, 2), []
    for kind, a, b in actions:
        if kind == 0 and a <= pool.num_free:
            blocks = pool.allocate(a)
            held.append(blocks)
            for block, digest in zip(blocks, digests(*([b, i] for i in range(len(blocks)))), strict=True):
                pool.publish(block, digest)
        elif kind == 1 and held:
            pool.release(held.pop(a % len(held)))
        elif kind == 2:
            found = pool.find(digests(*([b, i] for i in range(a))))
            pool.hold(found)
            held.append(found)
        elif kind == 3 and a == 0:
            pool.clear()
        everything = [block for blocks in held for block in blocks]
        assert pool.references == [everything.count(block) for block in range(6)]
        free = [*pool._empty, *pool._cached]
        assert sorted(free) == [block for block in range(6) if not pool.references[block]]
        assert {pool._block_of[digest]: digest for digest in pool._block_of} == pool._digest_of
        assert not set(pool._empty) & set(pool._digest_of)
