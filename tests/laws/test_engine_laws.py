"""The laws of the engine: the same request gives the same bits and the same text whatever happens around it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from interpreters import SMALL, Case, same_bits

from cutaway.engine.engine import Engine
from cutaway.engine.sampling import SamplingParams
from cutaway.engine.sequence import FinishReason, Sequence

CASES = [
    Case("reference", format="F32", activations="f32", kv_type="f32"),
    Case(format="mixed", activations="int8", kv_type="f16"),
    Case(format="F32", activations="f32", kv_type="q8_0"),
]
REAL = Case(config="qwen2.5-coder-0.5b.gguf", format="file")
EVERY_CASE = [
    *(pytest.param(case, id=str(case)) for case in CASES),
    pytest.param(REAL, id=str(REAL), marks=pytest.mark.slow),
]
every_case = pytest.mark.parametrize("case", EVERY_CASE)

RANDOM = SamplingParams(
    temperature=1.2, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3, seed=7, max_tokens=14
)
GREEDY = SamplingParams(max_tokens=14)
# prompt length, its seed, settings
REQUESTS = {
    "one": (1, 1, GREEDY),
    "block": (32, 2, RANDOM),
    "block-1": (31, 3, replace(RANDOM, seed=8)),
    "long": (75, 4, replace(RANDOM, top_k=5)),
    "again": (32, 2, RANDOM),
    "greedy": (9, 5, GREEDY),
}


class Watch:
    """An interpreter that keeps the logits every token was drawn from."""

    def __init__(self, interpreter) -> None:
        self.interpreter = interpreter
        self.logits: dict[tuple[int, int], np.ndarray] = {}  # (the sequence's number, tokens before the draw)

    def run(self, batch, kv_cache, taps=None):
        logits = self.interpreter.run(batch, kv_cache, taps)
        for sequence, row in zip(batch.sampled, logits, strict=True):
            self.logits[sequence.number, len(sequence)] = np.array(row)
        return logits


def prompt_of(case: Case, count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, case.model_config.vocab, count)]


def engine_of(case: Case, interpreter, **settings) -> Engine:
    settings = {"max_context": 128, "num_blocks": 64, "k_type": case.kv_type, "v_type": case.kv_type, **settings}
    return Engine(Watch(interpreter), case.model_config, **settings)


def add(engine: Engine, case: Case, name: str, **changes) -> list[Sequence]:
    count, seed, params = REQUESTS[name]
    return engine.add(prompt_of(case, count, seed), replace(params, **changes), record=True)  # record: all logits


def finish(engine: Engine, limit: int = 3000) -> None:
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def outcome(engine: Engine, sequence: Sequence) -> tuple[list[int], FinishReason | None, np.ndarray]:
    count = len(sequence.prompt_ids)
    rows = [engine.interpreter.logits[sequence.number, count + i] for i in range(len(sequence.output_ids))]
    return sequence.output_ids, sequence.finish_reason, np.stack(rows)


def same(a, b) -> bool:
    return a[0] == b[0] and a[1] == b[1] and same_bits(a[2], b[2])


def solo(case: Case, interpreter, name: str, **changes):
    """A request by itself in a fresh engine, in one chunk: what everything else is compared with."""
    engine = engine_of(case, interpreter, prefix_cache=False)
    (sequence,) = add(engine, case, name, **changes)
    finish(engine)
    assert len(sequence.output_ids) == 14
    return outcome(engine, sequence)


@every_case
def test_law_1_the_kv_cache_on_is_the_kv_cache_off(case):
    interpreter = case.interpreter()
    for name in ("one", "block-1", "greedy"):
        engine = engine_of(case, interpreter, kv_cache=False)
        (sequence,) = add(engine, case, name)
        finish(engine)
        assert same(outcome(engine, sequence), solo(case, interpreter, name)), name


@every_case
@pytest.mark.parametrize("chunk", [1, 7, 32, 33])
def test_law_2_a_prompt_in_chunks(case, chunk):
    interpreter = case.interpreter()
    engine = engine_of(case, interpreter, chunk=chunk)
    sequences = {name: add(engine, case, name)[0] for name in ("long", "block")}
    finish(engine)
    for name, sequence in sequences.items():
        assert same(outcome(engine, sequence), solo(case, interpreter, name)), name


@every_case
def test_law_2_a_prompt_found_in_the_prefix_cache(case):
    interpreter = case.interpreter()
    engine = engine_of(case, interpreter)
    found = []
    for name in ("block", "block", "long", "long", "block-1", "block-1"):
        (sequence,) = add(engine, case, name)
        finish(engine)
        found.append(sequence.cached_tokens)
        assert same(outcome(engine, sequence), solo(case, interpreter, name)), name
        assert sequence.cached_tokens < len(sequence.prompt_ids)
    assert found[3] == 64
    engine.pool.clear()
    assert engine.pool.num_held == 0


@every_case
def test_law_3_alone_or_in_any_company(case):
    interpreter = case.interpreter()
    expected = {name: solo(case, interpreter, name) for name in REQUESTS}
    for order in list(itertools.permutations(REQUESTS))[::150]:
        engine = engine_of(case, interpreter, chunk=40)
        sequences = {}
        for name in order:
            sequences[name] = add(engine, case, name)[0]
            engine.step()  # they arrive one step apart
        finish(engine)
        for name in REQUESTS:
            assert same(outcome(engine, sequences[name]), expected[name]), f"{name} in {order}"


@every_case
def test_law_6_preempted_and_resumed_is_uninterrupted(case):
    interpreter = case.interpreter()
    expected = {name: solo(case, interpreter, name) for name in REQUESTS}
    engine = engine_of(case, interpreter, num_blocks=16, block_size=8)
    sequences = {name: add(engine, case, name)[0] for name in ("long", "one", "block", "again", "block-1", "greedy")}
    finish(engine)
    assert engine.stats.preemptions > 0
    for name, sequence in sequences.items():
        assert same(outcome(engine, sequence), expected[name]), name
    assert engine.pool.num_held == 0


@every_case
def test_law_6_cancelled_sequences_give_every_block_back_and_disturb_nobody(case):
    interpreter = case.interpreter()
    engine = engine_of(case, interpreter, chunk=16)
    sequences = {name: add(engine, case, name)[0] for name in REQUESTS}
    for step, name in enumerate(("long", "block", "one")):
        for _ in range(step + 1):
            engine.step()
        engine.cancel(sequences[name])
        assert sequences[name].finish_reason is FinishReason.CANCELLED
        assert not sequences[name].blocks
    finish(engine)
    for name in ("block-1", "again", "greedy"):
        assert same(outcome(engine, sequences[name]), solo(case, interpreter, name)), name
    assert engine.pool.num_held == 0
    assert engine.pool.num_free == 64


@every_case
def test_law_7_a_seed_draws_the_same_anywhere(case):
    interpreter = case.interpreter()
    engine = engine_of(case, interpreter, max_seqs=8)
    add(engine, case, "greedy")
    engine.step()
    choices = add(engine, case, "block", n=3)
    add(engine, case, "long")
    finish(engine)
    texts = [choice.output_ids for choice in choices]
    assert len({tuple(text) for text in texts}) == 3, "choices of one request differ"
    assert same(outcome(engine, choices[0]), solo(case, interpreter, "block"))
    again = engine_of(case, interpreter)
    repeated = add(again, case, "block", n=3)
    finish(again)
    assert [choice.output_ids for choice in repeated] == texts
    other = engine_of(case, interpreter)
    (sequence,) = add(other, case, "block", seed=1234)
    finish(other)
    assert sequence.output_ids != texts[0]


@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0"])
def test_the_stand_in_kv_cache_of_the_tests_is_the_engines(kv_type):
    """The laws of the forward pass run on `steps.KVStore`; it has the layout of the engine's."""
    from steps import KVStore

    from cutaway.engine.kv_cache import KVCache

    ours, theirs = KVStore(SMALL, 3, kv_type, kv_type, 8), KVCache(SMALL, 3, kv_type, kv_type, 8)
    for name in ("k", "v", "k_scale", "v_scale"):
        found = [(array.shape, array.dtype) for array in getattr(ours, name)]
        assert found == [(array.shape, array.dtype) for array in getattr(theirs, name)]
