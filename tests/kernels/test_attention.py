"""Attention and the stored keys and values, through a Program of one layer.

The definition is computed in float64 from what the native run itself stored, so nothing but attention is measured.
One prompt of many tokens holds every context length up to its own.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from raw import ISAS, THREADS, same_bits
from small import KV_TYPES, config, ids_of, native, poisoned, record
from steps import Stage
from tolerances import EXP_SMALLEST
from tolerances import attention as allowed_error

from cutaway.forward import reference
from cutaway.forward.taps import Taps

SPAN = 256  # keys of one attention span
BORDERS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 263, 264, 265, 511, 512, 513, 520)
PAIRS = list(itertools.product(KV_TYPES, KV_TYPES))

every_isa = pytest.mark.parametrize("isa", ISAS)
every_pair = pytest.mark.parametrize(("k_type", "v_type"), PAIRS)


def stage_of(interpreter, k_type="f16", v_type=None, block_size=32, seed=0) -> Stage:
    cfg = interpreter.program.config
    return poisoned(
        Stage(
            interpreter, cfg, k_type, v_type=v_type, num_blocks=24 * 32 // block_size, block_size=block_size, seed=seed
        )
    )


def assert_is_attention(found: dict[str, np.ndarray], stage: Stage) -> None:
    """`attn.mix` of every token is softmax(q k / sqrt(head_dim)) v over the keys up to its own."""
    cfg, count = stage.interpreter.program.config, len(found["attn.mix"])
    table = np.array(stage.sequences["a"].blocks)
    keys, values = reference.keys_and_values(stage.kv_cache, 0, table, count, np.float64)
    q = found["attn.q_rope"].astype(np.float64).reshape(count, cfg.num_kv_heads, cfg.group, cfg.head_dim)
    q = q.transpose(1, 2, 0, 3)  # [num_kv_heads, group, count, head_dim]
    unseen = np.triu(np.ones((count, count), bool), 1)
    scores = np.where(unseen, -np.inf, q @ keys[:, None] / np.sqrt(cfg.head_dim))
    sizes = np.where(unseen, 0, np.abs(q) @ np.abs(keys)[:, None] / np.sqrt(cfg.head_dim)).max(-1, keepdims=True)
    weights = reference.softmax(scores)
    expected, size = weights @ values[:, None], weights @ np.abs(values)[:, None]
    mix = found["attn.mix"].reshape(count, cfg.num_kv_heads, cfg.group, cfg.head_dim).transpose(1, 2, 0, 3)
    times, plus = allowed_error(cfg.head_dim, count, -(-count // SPAN))
    least = EXP_SMALLEST * np.abs(values).sum(1)[:, None, None]
    off = np.abs(mix - expected) - (times * sizes + plus) * size - least
    assert (off <= 0).all(), f"off by {np.abs(mix - expected).max()} at {np.argwhere(off > 0)[0]}"


def assert_is_stored(found: dict[str, np.ndarray], stage: Stage) -> None:
    """What lies in the KV cache is what the definition stores there, to the bit; and nothing else was touched."""
    cfg, kv = stage.interpreter.program.config, stage.kv_cache
    other = poisoned(
        Stage(None, cfg, kv.k_type, v_type=kv.v_type, num_blocks=kv.num_blocks, block_size=kv.block_size)
    ).kv_cache
    positions = np.arange(len(found["attn.v"]))
    blocks = np.array(stage.sequences["a"].blocks)
    slots = blocks[positions // kv.block_size] * kv.block_size + positions % kv.block_size
    reference.store(other, 0, slots, found["attn.k_rope"], found["attn.v"], cfg)
    for name in ("k", "v", "k_scale", "v_scale"):
        for ours, theirs in zip(getattr(kv, name), getattr(other, name), strict=True):
            assert np.array_equal(ours, theirs, equal_nan=ours.dtype != np.int8), name


@every_isa
@every_pair
def test_attention_over_every_context_length(k_type, v_type, isa):
    """1 to 521 keys: around blocks of 32 and spans of 256."""
    cfg = config()
    stage = stage_of(native(cfg, isa), k_type, v_type)
    found = record(stage, ids_of(cfg, 521))
    assert_is_attention(found, stage)
    assert_is_stored(found, stage)


@every_isa
@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 104, 112, 120, 128, 136, 192, 256])
def test_attention_with_heads_of_any_size(head_dim, isa):
    cfg = config(head_dim=head_dim)
    for k_type, v_type in PAIRS if head_dim % 32 == 0 else itertools.product(("f16", "f32"), repeat=2):
        stage = stage_of(native(cfg, isa), k_type, v_type)
        found = record(stage, ids_of(cfg, 42))
        assert_is_attention(found, stage)
        assert_is_stored(found, stage)


@every_isa
@pytest.mark.parametrize("group", range(1, 10))
def test_attention_with_query_groups_of_any_size(group, isa):
    for kv_type, num_kv_heads in (("f16", 1), ("f32", 3), ("q8_0", 2)):
        cfg = config(group=group, num_kv_heads=num_kv_heads)
        stage = stage_of(native(cfg, isa), kv_type)
        found = record(stage, ids_of(cfg, 70))
        assert_is_attention(found, stage)
        assert_is_stored(found, stage)


@every_isa
@pytest.mark.parametrize("block_size", [8, 16, 24, 40, 64])
def test_attention_over_blocks_of_any_size(block_size, isa):
    cfg = config()
    for kv_type in KV_TYPES:
        stage = stage_of(native(cfg, isa), kv_type, block_size=block_size)
        found = record(stage, ids_of(cfg, 270))
        assert_is_attention(found, stage)
        assert_is_stored(found, stage)


@every_isa
@every_pair
def test_a_token_at_a_time_is_the_same_bits_as_one_prompt(k_type, v_type, isa):
    """At every border of a block and of a span, on other threads, through other blocks."""
    cfg = config(group=5)
    ids = ids_of(cfg, max(BORDERS))
    whole = record(stage_of(native(cfg, isa), k_type, v_type), ids)["attn.mix"]
    for threads in THREADS:
        stage = stage_of(native(cfg, isa, threads), k_type, v_type, seed=threads)
        done = 0
        for length in BORDERS:
            if length - 1 > done:
                rest = record(stage, ids[done : length - 1])["attn.mix"]
                assert same_bits(rest, whole[done : length - 1]), f"{done} to {length - 1}, {threads} threads"
            last = record(stage, ids[length - 1 : length])["attn.mix"]
            assert same_bits(last, whole[length - 1 : length]), f"{length} keys, {threads} threads"
            done = length


@pytest.mark.skipif(not {"avx2", "avx512vnni"} <= set(ISAS), reason="this processor has one of them at most")
@every_pair
def test_instruction_sets_with_the_same_float_order_give_the_same_bits(k_type, v_type):
    cfg = config()
    ids = ids_of(cfg, 300)
    first, second = (
        record(stage_of(native(cfg, isa), k_type, v_type), ids)["attn.mix"] for isa in ("avx2", "avx512vnni")
    )
    assert same_bits(first, second)


@every_isa
@every_pair
def test_what_lies_past_the_last_key_makes_no_difference(k_type, v_type, isa):
    """NaN, infinities and large numbers in the unused places of a sequence's own last block."""
    cfg = config()
    ids = ids_of(cfg, 40)
    clean = record(stage_of(native(cfg, isa), k_type, v_type), ids)["attn.mix"]
    for value in (np.nan, np.inf, -np.inf, 60000.0):
        stage = stage_of(native(cfg, isa), k_type, v_type)
        assert same_bits(record(stage, ids[:35])["attn.mix"], clean[:35])
        kv, block, late = stage.kv_cache, stage.sequences["a"].blocks[1], slice(3, None)
        for arrays in (kv.k, kv.k_scale):
            for array in arrays:
                array[block, ..., late] = 127 if array.dtype == np.int8 else value
        for arrays in (kv.v, kv.v_scale):
            for array in arrays:
                array[block, :, late] = 127 if array.dtype == np.int8 else value
        for position in range(35, 40):
            assert same_bits(record(stage, ids[position : position + 1])["attn.mix"], clean[position : position + 1])


@every_isa
@every_pair
def test_a_key_or_value_that_is_not_a_number_is_never_hidden(k_type, v_type, isa):
    cfg = config()
    ids = ids_of(cfg, 40)
    for broken, kind in (("k", k_type), ("v", v_type)):
        for position in (0, 13, 37):
            stage = stage_of(native(cfg, isa), k_type, v_type)
            record(stage, ids[:39])
            block, offset = stage.sequences["a"].blocks[position // 32], position % 32
            array = getattr(stage.kv_cache, broken + ("_scale" if kind == "q8_0" else ""))[0]
            array[(block, ..., offset) if broken == "k" else (block, slice(None), offset)] = np.nan
            assert np.isnan(record(stage, ids[39:])["attn.mix"]).all(), f"{broken} of position {position}"


@every_isa
@every_pair
def test_what_is_stored_of_a_key_or_value_that_is_not_a_number_is_not_one(k_type, v_type, isa):
    cfg = config()
    interpreter = native(cfg, isa)
    for name in ("k_rope", "v"):
        for dim in (0, 31):

            def broken(x: np.ndarray, dim: int = dim) -> np.ndarray:
                return np.where((np.arange(len(x)) == 5)[:, None] & (np.arange(x.shape[1]) % 32 == dim), np.nan, x)

            stage = stage_of(interpreter, k_type, v_type)
            full = [f"layers.0.attn.{name}", "layers.0.attn.mix"]
            taps = Taps(interpreter.program, record=full[1:], patch={full[0]: broken})
            stage.feed({"a": ids_of(cfg, 40)}, "none", taps=taps)
            mix = np.array(taps.recording[full[1]])
            assert np.isfinite(mix[:5]).all()
            assert np.isnan(mix[5:]).any(axis=1).all(), f"{name}, dimension {dim}"


@every_isa
def test_scores_far_apart_do_not_overflow(isa):
    """Queries and keys of hundreds: one key takes all the weight, and its value comes out."""
    cfg = config(head_dim=32, group=2)
    interpreter = native(cfg, isa)
    for name in ("layers.0.attn.q.bias", "layers.0.attn.k.bias"):
        interpreter._vectors[name][:] = np.random.default_rng(1).normal(0, 60, len(interpreter._vectors[name]))
    for k_type, v_type in PAIRS:
        stage = stage_of(interpreter, k_type, v_type)
        found = record(stage, ids_of(cfg, 300))
        assert np.abs(found["attn.q_rope"]).max() > 100
        assert_is_attention(found, stage)
        assert_is_stored(found, stage)


@every_isa
def test_q8_0_codes_half_way_between_two_go_to_the_even_one(isa):
    cfg = config()
    rng = np.random.default_rng(4)

    def ties(x: np.ndarray) -> np.ndarray:
        """(code + 1/2) * scale, exactly, where the scale is the float16 of the largest value / 127."""
        scales = np.float16(rng.uniform(0.01, 1, (len(x), x.shape[1] // 32, 1))).astype(np.float32)
        codes = rng.integers(-126, 126, (*scales.shape[:2], 32)) + np.float32(0.5)
        codes[..., 7] = 127
        return (codes.astype(np.float32) * scales).reshape(x.shape)

    stage = stage_of(native(cfg, isa), "q8_0")
    names = {name: f"layers.0.attn.{name}" for name in ("k_rope", "v")}
    taps = Taps(stage.interpreter.program, record=list(names.values()), patch=dict.fromkeys(names.values(), ties))
    stage.feed({"a": ids_of(cfg, 70)}, "none", taps=taps)
    assert_is_stored({f"attn.{name}": np.array(taps.recording[full]) for name, full in names.items()}, stage)
    codes = stage.kv_cache.k[0][stage.sequences["a"].blocks[0]]
    assert (np.abs(codes) == 127).sum() == cfg.num_kv_heads * 32
    assert (codes % 2 == 0).sum() == codes.size - (codes == 127).sum()
