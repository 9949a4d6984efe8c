"""A step that does not fit is refused with a KernelError, before anything is read or written past its end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from raw import same_bits
from small import config, ids_of, native
from steps import KVStore, Stage

from cutaway.errors import KernelError
from cutaway.forward.decoder import decoder
from cutaway.forward.native import NativeProgram

CONFIG = config(max_context=256)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def put(array: np.ndarray, at: int, value: int) -> np.ndarray:
    changed = array.copy()
    changed.flat[at] = value
    return changed


@pytest.fixture
def stage() -> Stage:
    return Stage(native(CONFIG), CONFIG, "f16", num_blocks=8)


LARGEST = np.iinfo(np.int32).max
BAD_BATCHES = {
    "no tokens": lambda b: {"token_ids": ints(), "positions": ints(), "slots": ints(), "query_starts": ints(0, 0)},
    "no sequences": lambda b: {
        "query_starts": ints(0),
        "context_lengths": ints(),
        "block_tables": np.zeros((0, 2), np.int32),
    },
    "no starts": lambda b: {"query_starts": ints(), "context_lengths": ints()},
    "a token id past the vocabulary": lambda b: {"token_ids": put(b.token_ids, 3, CONFIG.vocab)},
    "a large token id": lambda b: {"token_ids": put(b.token_ids, 39, LARGEST)},
    "a negative token id": lambda b: {"token_ids": put(b.token_ids, 0, -1)},
    "a position that jumps": lambda b: {"positions": put(b.positions, 5, 7)},
    "a negative position": lambda b: {"positions": put(b.positions, 0, -1)},
    "positions that start late": lambda b: {"positions": b.positions + 1},
    "another slot": lambda b: {"slots": put(b.slots, 2, int(b.slots[3]))},
    "a slot past the cache": lambda b: {"slots": put(b.slots, 2, LARGEST)},
    "a negative slot": lambda b: {"slots": put(b.slots, 2, -1)},
    "a block past the cache": lambda b: {"block_tables": put(b.block_tables, 1, 8)},
    "a negative block": lambda b: {"block_tables": put(b.block_tables, 0, -1)},
    "a block table too short": lambda b: {"block_tables": b.block_tables[:, :1].copy()},
    "an empty block table": lambda b: {"block_tables": np.zeros((1, 0), np.int32)},
    "block tables of another number of sequences": lambda b: {"block_tables": np.zeros((2, 2), np.int32)},
    "a context longer than max_context": lambda b: {"context_lengths": ints(257)},
    "the longest context": lambda b: {"context_lengths": ints(LARGEST)},
    "a context shorter than its tokens": lambda b: {"context_lengths": ints(39)},
    "a negative context": lambda b: {"context_lengths": ints(-1)},
    "starts that leave tokens out": lambda b: {"query_starts": ints(0, 39)},
    "starts that skip tokens": lambda b: {"query_starts": ints(1, 40)},
    "starts past the tokens": lambda b: {"query_starts": ints(0, 41)},
    "starts that fall": lambda b: {
        "query_starts": ints(0, 200, 40),
        "context_lengths": ints(200, 40),
        "block_tables": np.tile(b.block_tables, (2, 4)),
    },
    "starts that fall from far": lambda b: {
        "query_starts": ints(0, 1 << 24, 40),
        "context_lengths": ints(40, 40),
        "block_tables": np.repeat(b.block_tables, 2, axis=0),
    },
    "a block past the cache, and slots in it": lambda b: {
        "block_tables": put(b.block_tables, 1, 1 << 20),
        "slots": np.where(np.arange(40) < 32, b.slots, (1 << 25) + np.arange(40) - 32).astype(np.int32),
    },
    "a sequence without tokens": lambda b: {
        "query_starts": ints(0, 0, 40),
        "context_lengths": ints(40, 40),
        "block_tables": np.repeat(b.block_tables, 2, axis=0),
    },
    "one start too many": lambda b: {"query_starts": ints(0, 20, 40)},
    "an output row past the tokens": lambda b: {"output_rows": ints(0, 40)},
    "a negative output row": lambda b: {"output_rows": ints(-1)},
    "fewer positions than tokens": lambda b: {"positions": b.positions[:-1].copy()},
    "fewer slots than tokens": lambda b: {"slots": b.slots[:-1].copy()},
    "int64 token ids": lambda b: {"token_ids": b.token_ids.astype(np.int64)},
    "int64 slots": lambda b: {"slots": b.slots.astype(np.int64)},
    "float positions": lambda b: {"positions": b.positions.astype(np.float32)},
    "positions with gaps in memory": lambda b: {"positions": np.repeat(b.positions, 2)[::2]},
    "block tables with gaps in memory": lambda b: {"block_tables": np.repeat(b.block_tables, 2, axis=1)[:, ::2]},
    "a block table of one dimension": lambda b: {"block_tables": b.block_tables[0]},
    "a list": lambda b: {"token_ids": b.token_ids.tolist()},
    "the largest 0 logits": lambda b: {"head_top_k": 0},
    "the largest -1 logits": lambda b: {"head_top_k": -1},
    "more logits than the vocabulary has": lambda b: {"head_top_k": CONFIG.vocab + 1},
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_bad_batch_is_refused_and_the_next_step_is_as_if_it_had_not_been(stage, what):
    ids = ids_of(CONFIG, 41)
    clean = Stage(native(CONFIG), CONFIG, "f16", num_blocks=8)
    good = stage.batch({"a": ids[:40]})
    with pytest.raises(KernelError) as error:
        stage.interpreter.run(replace(good, **BAD_BATCHES[what](good)), stage.kv_cache)
    assert "\n" not in str(error.value)
    assert same_bits(stage.interpreter.run(good, stage.kv_cache), clean.feed({"a": ids[:40]})["a"])
    assert same_bits(stage.feed({"a": ids[40:]})["a"], clean.feed({"a": ids[40:]})["a"])


@pytest.mark.parametrize("block", [-1, 8, 1 << 20, LARGEST])
def test_a_block_of_earlier_tokens_that_does_not_exist_is_refused(stage, block):
    stage.feed({"a": ids_of(CONFIG, 40)})
    batch = stage.batch({"a": [1]})
    with pytest.raises(KernelError):
        stage.interpreter.run(replace(batch, block_tables=put(batch.block_tables, 0, block)), stage.kv_cache)


def wrong(attribute: str, change) -> dict:
    return {"attribute": attribute, "change": change}


BAD_CACHES = {
    "another type of keys": ("f32", wrong("k", lambda a: [x.astype(np.float16) for x in a])),
    "a smaller type of values": ("f32", wrong("v", lambda a: [x.astype(np.int8) for x in a])),
    "fewer layers": ("f16", wrong("k", lambda a: a[:-1])),
    "no layers": ("f16", wrong("v", lambda a: [])),
    "fewer blocks of values": ("f16", wrong("v", lambda a: [x[:-1].copy() for x in a])),
    "fewer heads": ("f16", wrong("k", lambda a: [x[:, :1].copy() for x in a])),
    "smaller heads": ("f16", wrong("k", lambda a: [x[:, :, :16].copy() for x in a])),
    "keys laid out as values": (
        "f16",
        wrong("k", lambda a: [x.reshape(8, 2, 16, 64) for x in a]),
    ),
    "three dimensions": ("f16", wrong("k", lambda a: [x[0] for x in a])),
    "gaps in memory": ("f16", wrong("k", lambda a: [np.repeat(x, 2, axis=3)[..., ::2] for x in a])),
    "read-only": ("f16", wrong("v", lambda a: [read_only(x) for x in a])),
    "no scales": ("q8_0", wrong("k_scale", lambda a: [])),
    "scales of another type": ("q8_0", wrong("v_scale", lambda a: [x.astype(np.float32) for x in a])),
    "scales of fewer blocks": ("q8_0", wrong("v_scale", lambda a: [x[:-1].copy() for x in a])),
    "an unknown type": ("f16", wrong("k_type", lambda a: "f8")),
    "blocks that are not whole vectors": ("f16", wrong("block_size", lambda a: 12)),
}


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("what", BAD_CACHES)
def test_a_kv_cache_of_another_shape_is_refused(stage, what):
    kv_type, fault = BAD_CACHES[what]
    kv = KVStore(CONFIG, 8, kv_type, kv_type)
    setattr(kv, fault["attribute"], fault["change"](getattr(kv, fault["attribute"])))
    batch = stage.batch({"a": ids_of(CONFIG, 40)})
    with pytest.raises(KernelError) as error:
        stage.interpreter.run(batch, kv)
    assert "\n" not in str(error.value)
    stage.interpreter.run(batch, stage.kv_cache)


def test_q8_0_needs_heads_of_whole_groups():
    cfg = config(head_dim=48)
    stage = Stage(native(cfg), cfg, "f32", num_blocks=8)
    with pytest.raises(KernelError):
        stage.interpreter.run(stage.batch({"a": [1, 2]}), KVStore(cfg, 8, "q8_0", "q8_0"))


def test_a_second_kv_cache_takes_the_place_of_the_first(stage):
    """Caches may come and go between steps; the last one given is the one used."""
    ids = ids_of(CONFIG, 12)
    first = stage.feed({"a": ids})["a"]
    for blocks in (2, 8, 5):
        other = Stage(stage.interpreter, CONFIG, "f16", num_blocks=blocks)
        assert same_bits(other.feed({"a": ids})["a"], first)


def test_what_no_kernel_is_made_for_is_refused():
    program = decoder(CONFIG)
    weights = tiny.random_weights(program)
    for options in ({"activations": "int4"}, {"isa": "mmx"}):
        with pytest.raises(KernelError):
            NativeProgram(program, weights, **options)
    for head_dim in (12, 264):  # no whole vectors; larger than the kernels' own memory for a query
        other = decoder(config(head_dim=head_dim))
        with pytest.raises(KernelError):
            NativeProgram(other, tiny.random_weights(other))


def test_a_batch_without_the_attributes_of_one_is_no_crash(stage):
    with pytest.raises(AttributeError):
        stage.interpreter.run(SimpleNamespace(head_top_k=None), stage.kv_cache)
