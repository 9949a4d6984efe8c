"""The largest logits, found with less work than all of them: always exactly those of the full head.

The weights are chosen against a method that looks at a weight's high bits first: rows that differ in their low bits
only, rows that are equal, scales of zero, of either sign and of very different size.
"""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from raw import ISAS, THREADS, filled, random_bytes, random_rows, same_bits, with_scales
from small import config, ids_of
from steps import Stage

from cutaway import quant
from cutaway.forward.decoder import decoder
from cutaway.forward.native import NativeProgram
from cutaway.forward.program import TopLogits
from cutaway.forward.taps import Taps
from cutaway.quant import Weight

VOCAB, HIDDEN = 5003, 96
COUNTS = (1, 2, 20, 50, VOCAB)
CONFIG = config(head_dim=8, group=1, num_kv_heads=1, vocab=VOCAB, hidden=HIDDEN, tied_head=False)


def near_rows(rng: np.random.Generator) -> np.ndarray:
    """One row over and over, but for its low bits."""
    data = np.repeat(random_rows("Q8_0", 1, HIDDEN, rng), VOCAB, axis=0).reshape(VOCAB, -1, 34)
    data[:, :, 2:] ^= rng.integers(0, 8, (VOCAB, data.shape[1], 32), dtype=np.uint8)
    return data.reshape(VOCAB, -1)


def sized_rows(rng: np.random.Generator) -> np.ndarray:
    data = random_bytes("Q8_0", VOCAB, HIDDEN, rng)
    return with_scales("Q8_0", data, rng.choice([-1.0, 1.0], (VOCAB, 3)) * 2.0 ** rng.integers(-20, 2, (VOCAB, 3)))


def one_high_row(rng: np.random.Generator) -> np.ndarray:
    data = random_rows("Q8_0", VOCAB, HIDDEN, rng)
    data[4777] = quant.quantize("Q8_0", 3 * quant.dequantize("Q8_0", data[4777:4778]))
    return data


HEADS = {
    "random": lambda rng: random_rows("Q8_0", VOCAB, HIDDEN, rng),
    "rows that differ in low bits": near_rows,
    "rows by turns equal": lambda rng: np.tile(random_rows("Q8_0", 17, HIDDEN, rng), (295, 1))[:VOCAB],
    "all rows equal": lambda rng: np.repeat(random_rows("Q8_0", 1, HIDDEN, rng), VOCAB, axis=0),
    "all zero": lambda rng: filled("Q8_0", VOCAB, HIDDEN, 0x55, 0.0),
    "all -128": lambda rng: filled("Q8_0", VOCAB, HIDDEN, 0x80, 0.01),
    "all 127, negative scale": lambda rng: filled("Q8_0", VOCAB, HIDDEN, 0x7F, -0.01),
    "scales from tiny to large": sized_rows,
    "one row above the others": one_high_row,
}


def programs(data: np.ndarray, isa: str, threads: int) -> NativeProgram:
    program = decoder(CONFIG)
    weights = dict(tiny.random_weights(program, seed=3))
    weights["head.weight"] = Weight("head.weight", "Q8_0", (VOCAB, HIDDEN), data)
    return NativeProgram(program, weights, activations="int8", threads=threads, isa=isa)


def assert_largest(interpreter: NativeProgram, ids: list[int], outputs: str, k: int, rows: np.ndarray) -> None:
    stage = Stage(interpreter, CONFIG, "f16")
    top = interpreter.run(stage.batch({"a": ids}, outputs, head_top_k=k), stage.kv_cache)
    assert isinstance(top, TopLogits)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    assert np.array_equal(top.ids, order), f"{k} of {outputs}"
    assert same_bits(top.values, np.take_along_axis(rows, order, axis=1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head", HEADS)
def test_the_largest_logits_are_those_of_the_full_head(head, isa):
    data = HEADS[head](np.random.default_rng(8))
    ids = ids_of(CONFIG, 9)
    for threads in THREADS:
        interpreter = programs(data, isa, threads)
        full = Stage(interpreter, CONFIG, "f16").logits(ids)
        for k in COUNTS:
            assert_largest(interpreter, ids, "all", k, full)
            for count in range(1, len(ids) + 1):  # a method that gives up is tried again later, and must be right then
                assert_largest(interpreter, ids[:count], "last", k, full[count - 1 : count])


@pytest.mark.parametrize("isa", ISAS)
def test_few_rows_are_finished_where_one_stands_out(isa):
    """So the test above does not only see full heads."""
    interpreter, ids = programs(one_high_row(np.random.default_rng(8)), isa, 2), ids_of(CONFIG, 9)
    finished = []
    for count in range(1, len(ids) + 1):
        stage = Stage(interpreter, CONFIG, "f16")
        interpreter.run(stage.batch({"a": ids[:count]}, "last", head_top_k=1), stage.kv_cache)
        finished.append(interpreter.head_rows_finished)
    assert 0 < min(filter(None, finished)) < VOCAB / 10


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_head_that_no_bound_holds_for_is_computed_in_full(isa, scale):
    data = one_high_row(np.random.default_rng(8)).reshape(VOCAB, -1, 34)
    data[17, 1, :2] = np.array([scale], np.float16).view(np.uint8)
    interpreter, ids = programs(data.reshape(VOCAB, -1), isa, 2), ids_of(CONFIG, 9)
    stage = Stage(interpreter, CONFIG, "f16")
    interpreter.run(stage.batch({"a": ids}, "last", head_top_k=1), stage.kv_cache)
    assert interpreter.head_rows_finished == 0


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_only_its_low_bits_make_the_largest_is_found(isa):
    """The worst case for a bound on the low bits: they all pull one way, in the best row up, in its rivals down."""
    ids = ids_of(CONFIG, 12)
    rng = np.random.default_rng(11)
    taps = Taps(decoder(CONFIG), record=["final_norm"])
    Stage(programs(filled("Q8_0", VOCAB, HIDDEN, 0), isa, 1), CONFIG, "f16").feed({"a": ids}, "last", taps=taps)
    signs = np.where(np.array(taps.recording["final_norm"])[-1] < 0, -1, 1)
    for share in (0.2, 0.4, 0.6):  # of the places where the rivals' high bits are one step better
        weights = np.tile(-16 * signs, (VOCAB, 1))  # far below
        for row in rng.choice(VOCAB, 12, replace=False):
            better = signs * (rng.random(HIDDEN) < share)
            weights[row] = 8 * better + np.where(signs < 0, 7, 0)
        best = int(rng.integers(VOCAB))
        weights[best] = np.where(signs < 0, 0, 7)
        codes = np.ascontiguousarray(weights.astype(np.int8)).view(np.uint8).reshape(VOCAB, -1, 32)
        data = np.zeros((VOCAB, HIDDEN // 32, 34), np.uint8)
        data[:, :, 2:] = codes
        interpreter = programs(with_scales("Q8_0", data.reshape(VOCAB, -1), 0.01), isa, 2)
        full = Stage(interpreter, CONFIG, "f16").feed({"a": ids}, "last")["a"]
        for k in (1, 5, 20):
            assert_largest(interpreter, ids, "last", k, full)
            if k == 1:
                assert 0 < interpreter.head_rows_finished < VOCAB / 4
