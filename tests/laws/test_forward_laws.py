"""The laws of the forward pass, bit for bit, on an interpreter by itself.

Nothing here has a tolerance. A reference that computes one token at a time stands beside the native interpreter: it
keeps the laws by construction, so a failure of both is a failure of the test.
"""

from __future__ import annotations

import numpy as np
import pytest
from interpreters import EVERY_CASE, REAL_CASES, Case, same_bits
from steps import Stage

from cutaway.forward.program import TopLogits
from cutaway.forward.taps import Taps

CHUNKS = (1, 7, 32, 33)
every_case = pytest.mark.parametrize("case", EVERY_CASE)


def ids_of(case: Case, count: int = 45, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, case.model_config.vocab, count)]


def long_count(case: Case) -> int:
    """Enough tokens for two spans of keys; three on a tiny model."""
    return 80 if case.kind == "reference" else 300 if case in REAL_CASES else 600


def stage_of(case: Case, interpreter=None, seed: int = 0) -> Stage:
    return Stage(interpreter or case.interpreter(), case.model_config, case.kv_type, seed=seed)


@every_case
def test_law_1_the_kv_cache_on_is_the_kv_cache_off(case):
    interpreter, ids = case.interpreter(), ids_of(case)
    stage = stage_of(case, interpreter)
    on = [stage.feed({"a": ids[:20]}, "last")["a"]]
    on += [stage.feed({"a": [token]}, "last")["a"] for token in ids[20:]]
    for count, logits in zip(range(20, 46), on, strict=True):
        off = stage_of(case, interpreter, seed=count).feed({"a": ids[:count]}, "last")["a"]
        assert same_bits(logits, off), f"{count} tokens"


@every_case
def test_law_2_any_chunks_are_one_chunk(case):
    interpreter, ids = case.interpreter(), ids_of(case)
    whole = stage_of(case, interpreter).logits(ids)
    for chunk in CHUNKS:
        assert same_bits(stage_of(case, interpreter, seed=chunk).logits(ids, chunk), whole), f"chunks of {chunk}"


@every_case
def test_law_2_a_long_context_in_any_chunks(case):
    """Past the spans that attention is computed in."""
    interpreter, ids = case.interpreter(), ids_of(case, long_count(case))
    whole = stage_of(case, interpreter).logits(ids)
    assert same_bits(stage_of(case, interpreter, seed=1).logits(ids, 33), whole)
    stage = stage_of(case, interpreter, seed=2)
    stage.feed({"a": ids[:-5]}, "none")
    ends = [stage.feed({"a": [token]}, "last")["a"] for token in ids[-5:]]
    assert same_bits(np.concatenate(ends), whole[-5:])


@every_case
def test_law_2_a_prefix_found_in_the_kv_cache_is_a_prefix_computed(case):
    interpreter = case.interpreter()
    stage, ids, tail = stage_of(case, interpreter), ids_of(case, 70), ids_of(case, 9, seed=5)
    stage.logits(ids, name="first")
    cached = stage.share("first", "second", 2)
    assert cached == 64
    assert same_bits(stage.feed({"second": tail})["second"], stage_of(case, interpreter).logits(ids[:64] + tail)[64:])


@every_case
def test_law_3_neighbours_and_their_order_make_no_difference(case):
    interpreter = case.interpreter()
    texts = {name: ids_of(case, count, seed=count) for name, count in {"a": 33, "b": 1, "c": 40, "d": 7}.items()}
    alone = {name: stage_of(case, interpreter).logits(ids) for name, ids in texts.items()}
    for order in ("abcd", "dcba", "bdac"):
        together = stage_of(case, interpreter, seed=len(order)).feed({name: texts[name] for name in order})
        for name in order:
            assert same_bits(together[name], alone[name]), f"{name} in {order}"


@every_case
def test_law_3_prompts_beside_new_tokens(case):
    """One step mixes sequences that read a prompt with sequences that add a token."""
    interpreter = case.interpreter()
    a, b, c = ids_of(case, 36, seed=1), ids_of(case, 50, seed=2), ids_of(case, 20, seed=3)
    alone = {name: stage_of(case, interpreter).logits(ids) for name, ids in (("a", a), ("b", b), ("c", c))}
    stage = stage_of(case, interpreter, seed=9)
    steps = [
        stage.feed({"a": a[:33]}),
        stage.feed({"b": b[:31], "a": a[33:34]}),
        stage.feed({"a": a[34:35], "c": c, "b": b[31:49]}),
        stage.feed({"b": b[49:], "a": a[35:]}),
    ]
    for name, expected in alone.items():
        found = np.concatenate([step[name] for step in steps if name in step])
        assert same_bits(found, expected), name


@every_case
def test_law_3_other_output_rows_make_no_difference(case):
    interpreter, ids = case.interpreter(), ids_of(case)
    whole = stage_of(case, interpreter).logits(ids)
    assert same_bits(stage_of(case, interpreter).feed({"a": ids}, "last")["a"], whole[-1:])
    assert stage_of(case, interpreter).feed({"a": ids}, "none")["a"].shape == (0, case.model_config.vocab)


@every_case
def test_law_4_any_number_of_threads(case):
    if case.kind == "reference":
        pytest.skip("NumPy has its own threads")
    ids = ids_of(case, long_count(case))
    runs = []
    for threads in (1, 2, 5):
        stage = stage_of(case, case.interpreter(threads=threads))
        prompt = stage.logits(ids)
        runs.append(np.concatenate([prompt, *(stage.feed({"a": [token]})["a"] for token in ids[:5])]))
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


@every_case
def test_law_5_taps_that_record_change_nothing(case):
    interpreter, ids = case.interpreter(), ids_of(case)
    plain = stage_of(case, interpreter).logits(ids, 33)
    taps = Taps(case.program, record=["*"])
    assert same_bits(stage_of(case, interpreter).logits(ids, 33, taps=taps), plain)
    assert same_bits(taps.recording["logits"], plain)
    assert taps.recording.names == case.program.names
    for op in case.program:
        assert taps.recording[op.name].shape == op.shape(len(ids), len(ids))
    assert same_bits(stage_of(case, interpreter).logits(ids, 33), plain), "after the taps are gone"


@every_case
def test_law_5_one_tap_at_a_time_records_what_all_together_do(case):
    interpreter, ids = case.interpreter(), ids_of(case, 12)
    together = Taps(case.program, record=["*"])
    plain = stage_of(case, interpreter).logits(ids, taps=together)
    layer = f"layers.{case.model_config.num_layers - 1}."
    for op in case.program:
        if op.layer is not None and not op.name.startswith(layer):
            continue
        taps = Taps(case.program, record=[op.name])
        assert same_bits(stage_of(case, interpreter).logits(ids, taps=taps), plain), op.name
        assert same_bits(taps.recording[op.name], together.recording[op.name]), op.name


@every_case
def test_law_5_a_patch_that_gives_back_what_it_got_changes_nothing(case):
    interpreter, ids = case.interpreter(), ids_of(case, 12)
    plain = stage_of(case, interpreter).logits(ids)
    for name in case.program.names:
        if ".1." not in name and name.startswith("layers."):
            continue
        taps = Taps(case.program, patch={name: lambda x: x.copy()})
        assert same_bits(stage_of(case, interpreter).logits(ids, taps=taps), plain), name


@every_case
def test_law_5_fused_is_unfused(case):
    if case.kind == "reference":
        pytest.skip("the reference fuses nothing")
    ids = ids_of(case)
    runs, recordings = [], []
    for fuse in (True, False):
        interpreter = case.interpreter(fuse=fuse)
        taps = Taps(case.program, record=["*"])
        runs.append(stage_of(case, interpreter).logits(ids, 32))
        runs.append(stage_of(case, interpreter).logits(ids, 1))
        runs.append(stage_of(case, interpreter).logits(ids, taps=taps))
        recordings.append(taps.recording)
    for run in runs[1:]:
        assert same_bits(run, runs[0])
    for name in case.program.names:
        assert same_bits(recordings[0][name], recordings[1][name]), name


@every_case
def test_the_same_step_twice_is_the_same(case):
    interpreter, ids = case.interpreter(), ids_of(case)
    assert same_bits(stage_of(case, interpreter, seed=1).logits(ids), stage_of(case, interpreter, seed=2).logits(ids))


@every_case
def test_the_largest_logits_are_those_of_the_full_head(case):
    """`head_top_k` is a shorter way to the same values, not to other ones."""
    if case.kind == "reference":
        pytest.skip("tests/unit/test_reference.py has it")
    interpreter, ids = case.interpreter(), ids_of(case)
    full = stage_of(case, interpreter).logits(ids)
    for k in (1, 5, min(40, case.model_config.vocab)):
        for outputs in ("all", "last"):
            stage = stage_of(case, interpreter)
            top = interpreter.run(stage.batch({"a": ids}, outputs, head_top_k=k), stage.kv_cache)
            assert isinstance(top, TopLogits)
            rows = full if outputs == "all" else full[-1:]
            expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
            assert np.array_equal(top.ids, expected)
            assert same_bits(top.values, np.take_along_axis(rows, expected, axis=1))
