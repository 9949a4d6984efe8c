"""The NumPy interpreter: each definition against numbers worked out by hand, then the whole Program."""

import math
from dataclasses import replace

import numpy as np
import pytest
from steps import KVStore, Stage, StepBatch
from tiny import TINY, VARIANTS, random_weights
from tolerances import EPS32, KV_F16_RELATIVE, KV_Q8_0_OF_LARGEST, dot_product

from cutaway import quant
from cutaway.errors import KernelError
from cutaway.forward import reference
from cutaway.forward.decoder import decoder
from cutaway.forward.program import TopLogits
from cutaway.forward.reference import ReferenceProgram

PROGRAM = decoder(TINY)
WEIGHTS = random_weights(PROGRAM)
HEADS_32 = replace(TINY, head_dim=32)  # q8_0 keys need heads of 32


def ids_of(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, TINY.vocab, count)]


def f32(*values) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# -- one operation at a time -------------------------------------------------------------------------------------------


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    y = reference.rms_norm(f32([3, 4], [0, 0]), f32(1, 10), eps=0.5)
    assert y[0] == pytest.approx([3 / math.sqrt(13), 40 / math.sqrt(13)], rel=4 * EPS32)
    assert list(y[1]) == [0, 0]


def test_head_norm_treats_each_head_by_itself():
    y = reference.head_norm(f32([3, 4, 300, 400]), f32(1, 10), eps=0.0)
    assert y[0, :2] == pytest.approx(y[0, 2:], rel=4 * EPS32)
    assert y[0, 0] == pytest.approx(3 / math.sqrt(12.5), rel=4 * EPS32)


def test_linear_is_rows_times_rows_plus_bias():
    x, weight = f32([1, 2], [0, 1]), f32([10, 1], [0, 5], [1, 1])
    assert reference.linear(x, weight, None).tolist() == [[12, 10, 3], [1, 5, 1]]
    assert reference.linear(x, weight, f32(1, 2, 3)).tolist() == [[13, 12, 6], [2, 7, 4]]


def test_rope_turns_halves_of_each_head():
    cos, sin = f32([0.5, 1.0]), f32([2.0, 0.0])
    y = reference.rope(f32([1, 2, 3, 4, 10, 20, 30, 40]), cos, sin)
    assert y.tolist() == [[1 * 0.5 - 3 * 2, 2, 3 * 0.5 + 1 * 2, 4, 10 * 0.5 - 30 * 2, 20, 30 * 0.5 + 10 * 2, 40]]


def test_rope_makes_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 16)), rng.normal(size=(1, 16))
    cos, sin = reference.rope_tables(TINY, 100)

    def score(i: int, j: int) -> float:
        turned = reference.rope(q, cos[[i]], sin[[i]]), reference.rope(k, cos[[j]], sin[[j]])
        return float((turned[0] @ turned[1].T)[0, 0])

    assert score(7, 4) == pytest.approx(score(90, 87), rel=1e-4)
    assert score(7, 4) != pytest.approx(score(7, 5), rel=1e-2)


def test_silu_mul_and_its_ends():
    y = reference.silu_mul(f32(0, 1, -1000, 1000, 1), f32(5, 2, 3, 2, 0))
    assert y == pytest.approx([0, 2 / (1 + math.exp(-1)), 0, 2000, 0], rel=4 * EPS32)


def test_softmax_of_large_scores_and_of_hidden_ones():
    assert reference.softmax(f32([1000, 1000, -np.inf])).tolist() == [[0.5, 0.5, 0]]


def test_the_largest_logits_fall_and_ties_go_to_the_lowest_id():
    top = reference.largest(f32([1, 5, 5, 0, 7, 5], [0, 0, 0, 0, 0, 0]), 3)
    assert isinstance(top, TopLogits)
    assert top.ids.dtype == np.int32
    assert top.values.dtype == np.float32
    assert top.ids.tolist() == [[4, 1, 2], [0, 1, 2]]
    assert top.values.tolist() == [[7, 5, 5], [0, 0, 0]]
    assert reference.largest(np.zeros((0, 6), np.float32), 2).ids.shape == (0, 2)


@pytest.mark.parametrize("k", [0, -1, 7])
def test_a_head_top_k_outside_the_vocabulary_is_refused(k):
    with pytest.raises(KernelError, match="head_top_k"):
        reference.largest(np.zeros((1, 6), np.float32), k)


# -- keys and values ---------------------------------------------------------------------------------------------------


def test_keys_and_values_go_to_their_slot_in_the_agreed_layout():
    cache = KVStore(TINY, 3, "f32", "f32", block_size=4)
    k, v = np.arange(32, dtype=np.float32)[None], np.arange(100, 132, dtype=np.float32)[None]
    reference.store(cache, 1, np.array([9]), k, v, TINY)  # block 2, offset 1
    for head, dim in ((0, 0), (0, 15), (1, 0), (1, 7)):
        assert cache.k[1][2, head, dim, 1] == head * 16 + dim
        assert cache.v[1][2, head, 1, dim] == 100 + head * 16 + dim
    assert (cache.k[1] == 99).sum() == cache.k[1].size - 32
    assert (cache.k[0] == 99).all()


def test_float16_keys_are_rounded():
    cache = KVStore(TINY, 1, "f16", "f32")
    x = np.full((1, 32), 1 + 2.0**-12, np.float32)
    reference.store(cache, 0, np.array([0]), x, x, TINY)
    keys, values = reference.keys_and_values(cache, 0, np.array([0]), 1, np.float32)
    assert (keys == 1).all()
    assert (values == 1 + 2.0**-12).all()


def test_q8_0_scale_and_codes():
    x = np.zeros((1, 1, 64), np.float32)
    x[0, 0, :4] = [127, -127, 2.5, 3.5]  # scale 1: half goes to even
    x[0, 0, 32:35] = [1e-9, 0, -1e-9]  # too small for a float16 scale
    codes, scales = reference.quantize_kv(x)
    assert scales.dtype == np.float16
    assert scales.tolist() == [[[1, 0]]]
    assert codes.dtype == np.int8
    assert codes[0, 0, :4].tolist() == [127, -127, 2, 4]
    assert not codes[0, 0, 32:].any()


def test_q8_0_codes_never_wrap_where_the_scale_was_rounded_down():
    x = np.full((1, 1, 32), 127 * 6.1e-8, np.float32)  # the smallest float16 is 6e-8: the scale loses a percent
    codes, scales = reference.quantize_kv(np.concatenate([x, x * 1.4], axis=1))
    assert (codes > 0).all()
    assert (scales > 0).all()


@pytest.mark.parametrize(("k_type", "v_type"), [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")])
def test_what_is_stored_is_read_back_through_the_block_table(k_type, v_type):
    cache = KVStore(HEADS_32, 5, k_type, v_type, block_size=4)
    rng = np.random.default_rng(3)
    k, v = (rng.normal(size=(10, 64)).astype(np.float32) for _ in "kv")
    table = np.array([3, 0, 4, -1])
    slots = table[np.arange(10) // 4] * 4 + np.arange(10) % 4
    reference.store(cache, 1, slots, k, v, HEADS_32)
    keys, values = reference.keys_and_values(cache, 1, table, 10, np.float32)
    assert keys.shape == (2, 32, 10)
    assert values.shape == (2, 10, 32)
    for kind, found, stored in (
        (k_type, keys, k.reshape(10, 2, 32).transpose(1, 2, 0)),
        (v_type, values, v.reshape(10, 2, 32).transpose(1, 0, 2)),
    ):
        largest = np.abs(stored).max(axis=1 if found is keys else 2, keepdims=True)
        bound = {"f32": 0, "f16": KV_F16_RELATIVE * np.abs(stored), "q8_0": KV_Q8_0_OF_LARGEST * largest}[kind]
        assert (np.abs(found - stored) <= bound).all()


def attend(q, k, v, config=TINY, **told) -> np.ndarray:
    """One sequence of all tokens given."""
    cache = KVStore(config, 4, "f32", "f32", block_size=4)
    count = len(q)
    numbers = np.arange(count, dtype=np.int32)
    batch = StepBatch(numbers, numbers, numbers, np.array([0, count]), np.array([count]), np.arange(4)[None], numbers)
    reference.store(cache, 0, batch.slots, k, v, config)
    return reference.attention(q, cache, 0, batch, config, **told)


def test_attention_with_equal_scores_is_the_mean_of_what_came_before():
    v = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    out = attend(np.zeros((5, 64), np.float32), np.ones((5, 32), np.float32), v)
    for token in range(5):
        mean = v[: token + 1].mean(axis=0)
        assert out[token] == pytest.approx(np.concatenate([mean[:16], mean[:16], mean[16:], mean[16:]]), abs=8 * EPS32)


@pytest.mark.parametrize(
    "told",
    [{}, {"window": 1}, {"window": 3}, {"softcap": 1.5}, {"scale": 0.7}, {"window": 2, "softcap": 0.5, "scale": 2.0}],
    ids=str,
)
def test_attention_against_the_formula_one_head_at_a_time(told):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(6, width)) for width in (64, 32, 32))
    out = attend(q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), **told)
    for token in range(6):
        first = max(0, token + 1 - told.get("window", 6))
        for head in range(4):
            own, shared = slice(head * 16, head * 16 + 16), slice(head // 2 * 16, head // 2 * 16 + 16)
            scores = [q[token, own] @ k[past, shared] * told.get("scale", 1 / 4) for past in range(first, token + 1)]
            if "softcap" in told:
                scores = [told["softcap"] * math.tanh(score / told["softcap"]) for score in scores]
            powers = np.exp(scores)
            expected = powers / powers.sum() @ v[first : token + 1, shared]
            assert out[token, own] == pytest.approx(expected, abs=64 * EPS32)


# -- the whole Program -------------------------------------------------------------------------------------------------


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal but for the order of sums (NumPy's matrix product has another one for another number of rows)."""
    return a.shape == b.shape and bool(np.abs(a - b).max(initial=0) <= dot_product(TINY.intermediate) * np.abs(b).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_neighbours_make_no_difference(variant):
    config = VARIANTS[variant]
    program = decoder(config)
    interpreter = ReferenceProgram(program, random_weights(program))
    a, b = ids_of(40, 1), ids_of(9, 2)
    whole = Stage(interpreter, config).logits(a)
    assert whole.shape == (40, config.vocab)
    assert whole.dtype == np.float32
    assert close(Stage(interpreter, config).logits(a, chunk=7), whole)
    stage = Stage(interpreter, config, block_size=8)
    first = stage.feed({"b": b[:5], "a": a[:33]})
    second = stage.feed({"a": a[33:], "b": b[5:]})
    assert close(np.concatenate([first["a"], second["a"]]), whole)
    assert close(np.concatenate([first["b"], second["b"]]), Stage(interpreter, config).logits(b))


def test_logits_exist_only_for_the_rows_that_were_asked_for():
    interpreter = ReferenceProgram(PROGRAM, WEIGHTS)
    a, b = ids_of(6, 1), ids_of(3, 2)
    every = Stage(interpreter, TINY).feed({"a": a, "b": b})
    last = Stage(interpreter, TINY).feed({"a": a, "b": b}, "last")
    assert close(last["a"], every["a"][-1:])
    assert close(last["b"], every["b"][-1:])
    stage = Stage(interpreter, TINY)
    batch = stage.batch({"a": a, "b": b})
    picked = interpreter.run(replace(batch, output_rows=np.array([7, 2], np.int32)), stage.kv_cache)
    assert close(picked, np.stack([every["b"][1], every["a"][2]]))
    assert Stage(interpreter, TINY).feed({"a": a}, "none")["a"].shape == (0, 97)
    rounding = ReferenceProgram(PROGRAM, random_weights(PROGRAM, "Q8_0"), "int8")
    assert Stage(rounding, TINY).feed({"a": a}, "none")["a"].shape == (0, 97)


def test_head_top_k_gives_the_same_values_as_all_logits():
    interpreter = ReferenceProgram(PROGRAM, WEIGHTS)
    full = Stage(interpreter, TINY).logits(ids_of(5))
    stage = Stage(interpreter, TINY)
    top = interpreter.run(stage.batch({"a": ids_of(5)}, head_top_k=4), stage.kv_cache)
    assert np.array_equal(np.take_along_axis(full, top.ids.astype(int), axis=1), top.values)
    assert np.array_equal(top.values, -np.sort(-full, axis=1)[:, :4])


def test_the_logits_of_a_far_position_need_no_table_made_before():
    interpreter = ReferenceProgram(PROGRAM, WEIGHTS)
    ids = ids_of(150)
    assert close(Stage(interpreter, TINY).logits(ids, chunk=10), Stage(interpreter, TINY).logits(ids))


def test_float64_stays_float64():
    interpreter = ReferenceProgram(PROGRAM, WEIGHTS, dtype=np.float64)
    wide = Stage(interpreter, TINY, "f64").logits(ids_of(20))
    assert wide.dtype == np.float64
    narrow = Stage(ReferenceProgram(PROGRAM, WEIGHTS), TINY).logits(ids_of(20))
    assert 0 < np.abs(wide - narrow).max() < dot_product(TINY.intermediate) * np.abs(wide).max()


def test_weights_that_are_not_kept_give_the_same_logits(monkeypatch):
    kept = Stage(ReferenceProgram(PROGRAM, WEIGHTS), TINY).logits(ids_of(20))
    monkeypatch.setattr(reference, "ROWS_AT_ONCE_BYTES", 64 * 4 * 10)  # ten rows of a weight at a time
    interpreter = ReferenceProgram(PROGRAM, WEIGHTS, keep_bytes=0)
    assert close(Stage(interpreter, TINY).logits(ids_of(20)), kept)
    assert not interpreter._kept
    interpreter = ReferenceProgram(PROGRAM, WEIGHTS, keep_bytes=100_000)  # some of them
    assert close(Stage(interpreter, TINY).logits(ids_of(20)), kept)
    assert 50_000 < sum(values.nbytes for values in interpreter._kept.values()) <= 100_000


def test_stored_precision_shows_in_the_logits_and_no_more_than_it_must():
    program = decoder(HEADS_32)
    interpreter = ReferenceProgram(program, random_weights(program))
    exact = Stage(interpreter, HEADS_32, "f32").logits(ids_of(60))
    off = {
        kind: np.abs(Stage(interpreter, HEADS_32, kind).logits(ids_of(60)) - exact).max() for kind in ("f16", "q8_0")
    }
    assert 1e-5 < off["f16"] < off["q8_0"] < 0.5


@pytest.mark.parametrize("format", ["Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_int8_activations_concern_quantised_weights_only(format):
    weights = random_weights(PROGRAM, format)
    plain = Stage(ReferenceProgram(PROGRAM, weights, "f32"), TINY).logits(ids_of(20))
    rounded = Stage(ReferenceProgram(PROGRAM, weights, "int8"), TINY).logits(ids_of(20))
    if format in ("F16", "BF16"):
        assert np.array_equal(plain, rounded)
    else:
        assert 1e-3 < np.abs(plain - rounded).max() < 1


def test_int8_linear_is_integer_dot_products_times_scales():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, 64)).astype(np.float32)
    data = quant.quantize("Q8_0", rng.normal(size=(7, 64)).astype(np.float32)).reshape(7, 2, 34)
    d = data[:, :, :2].copy().view("<f2")[..., 0].astype(np.float64)  # [7, 2]
    w_codes = data[:, :, 2:].copy().view(np.int8).astype(np.int64)  # [7, 2, 32]
    codes, scales = quant.quantize_activations(x)
    integers = np.einsum("tgk,rgk->trg", codes.reshape(3, 2, 32).astype(np.int64), w_codes)
    expected = (integers * scales[:, None, :].astype(np.float64) * d).sum(axis=-1)
    found = reference.linear(reference.round_activations(x), quant.dequantize("Q8_0", data.reshape(7, 68)), None)
    assert np.abs(found - expected).max() <= dot_product(64) * 8 * np.abs(expected).max()


def test_weights_that_do_not_fit_are_refused_by_name():
    name = "layers.1.attn.k.weight"
    with pytest.raises(KernelError, match=r"layers\.1\.attn\.k\.weight.*no such weight.*\(32, 64\)"):
        ReferenceProgram(PROGRAM, {key: value for key, value in WEIGHTS.items() if key != name})
    with pytest.raises(KernelError, match=r"found \(64, 64\), expected \(32, 64\)"):
        ReferenceProgram(PROGRAM, {**WEIGHTS, name: WEIGHTS["layers.1.attn.q.weight"]})
    with pytest.raises(KernelError, match="activations"):
        ReferenceProgram(PROGRAM, WEIGHTS, "int4")
