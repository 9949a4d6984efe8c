"""The loop: what a request may be, how it ends, what a failing step leaves behind, and times by a clock set by hand."""

from __future__ import annotations

import numpy as np
import pytest
import script
import tiny

from cutaway.engine.engine import Engine, Event
from cutaway.engine.sampling import SamplingParams
from cutaway.engine.sequence import FinishReason, Phase
from cutaway.errors import ContextLengthError, RequestError
from cutaway.forward.decoder import decoder
from cutaway.forward.reference import ReferenceProgram
from cutaway.forward.taps import Taps

CONFIG = script.CONFIG


def run(engine: Engine, prompt=(1, 2, 3), **settings):
    (sequence,) = engine.add(prompt, SamplingParams(**settings))
    script.finish(engine)
    return sequence


# -- accepting a request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], (), np.array([], np.int64), ["a"], [1.5], [[1, 2]], [97], [-1], [True], "ab"])
def test_a_prompt_that_is_none(prompt):
    engine = script.engine_of(script.Script([5]))
    with pytest.raises(RequestError) as refused:
        engine.add(prompt, SamplingParams())
    assert refused.value.param == "prompt"
    assert not engine.has_work


def test_a_prompt_may_be_an_array():
    assert run(script.engine_of(script.Script([5])), np.arange(3), max_tokens=2).prompt_ids == (0, 1, 2)


def test_serve_prompt_too_long():
    for count, accepted in ((62, True), (63, True), (64, False), (65, False), (100, False)):
        engine = script.engine_of(script.Script([5]))
        if accepted:
            sequence = run(engine, [1] * count, max_tokens=1)
            assert (sequence.output_ids, sequence.finish_reason) == ([5], FinishReason.LENGTH)
            continue
        with pytest.raises(ContextLengthError) as refused:
            engine.add([1] * count, SamplingParams())
        assert str(count) in str(refused.value)
        assert "64" in str(refused.value)
    sequence = run(script.engine_of(script.Script([5])), [1] * 62, max_tokens=5)
    assert (len(sequence.output_ids), sequence.finish_reason) == (2, FinishReason.LENGTH)


@pytest.mark.parametrize(("param", "settings"), [("logit_bias", {97: 1}), ("stop_token_ids", [97])])
def test_ids_outside_the_vocabulary(param, settings):
    with pytest.raises(RequestError) as refused:
        script.engine_of(script.Script([5])).add([1], SamplingParams(**{param: settings}))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_context": 1}, "max_context"),
        ({"max_context": CONFIG.max_context + 1}, "max_context"),
        ({"chunk": 0}, "chunk"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 15}, "num_blocks"),
        ({"k_type": "f8"}, "k_type"),
    ],
)
def test_an_engine_that_cannot_be(settings, param):
    with pytest.raises(RequestError) as refused:
        script.engine_of(script.Script([5]), **settings)
    assert refused.value.param == param


# -- ending -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [11, 12])
def test_stop_several_eos_ids(end):
    sequence = run(script.engine_of(script.Script([6, end, 6]), eos_ids={11, 12}))
    assert (sequence.output_ids, sequence.finish_reason, sequence.stop_token) == ([6, end], FinishReason.STOP, end)


def test_ignore_eos_and_stop_token_ids():
    engine = script.engine_of(script.Script([6, 11, 7, 12]), eos_ids={11})
    assert run(engine, ignore_eos=True, max_tokens=9).finish_reason is FinishReason.LENGTH
    sequence = run(engine, ignore_eos=True, stop_token_ids=[12])
    assert (sequence.output_ids, sequence.stop_token) == ([6, 11, 7, 12], 12)


def test_stop_finish_reason():
    assert run(script.engine_of(script.Script([5])), max_tokens=3).finish_reason is FinishReason.LENGTH
    at_the_limit = run(script.engine_of(script.Script([5, 5, 11]), eos_ids={11}), max_tokens=3)
    assert (at_the_limit.output_ids, at_the_limit.finish_reason) == ([5, 5, 11], FinishReason.STOP)
    assert run(script.engine_of(script.Script([5]))).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 1000, None])
def test_kv_context_end_runaway(max_tokens):
    interpreter = script.Script([11])
    engine = script.engine_of(interpreter, eos_ids={11})
    sequence = run(engine, [1] * 60, max_tokens=max_tokens, logit_bias={11: -100})
    assert len(sequence.output_ids) == min(max_tokens or 99, 4)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert max(int(batch.positions.max()) for batch in interpreter.batches) <= 63


@pytest.mark.parametrize(("max_tokens", "count"), [(None, 40), (1, 1), (10**9, 40)])
def test_serve_max_tokens_null(max_tokens, count):
    sequence = run(script.engine_of(script.Script([5] * 39 + [11]), eos_ids={11}), max_tokens=max_tokens)
    assert len(sequence.output_ids) == count


def test_serve_max_tokens_zero_is_an_empty_answer():
    interpreter = script.Script([5])
    engine = script.engine_of(interpreter)
    (sequence,) = engine.add([1], SamplingParams(max_tokens=0))
    assert (sequence.output_ids, sequence.finish_reason) == ([], FinishReason.LENGTH)
    assert not engine.has_work
    assert interpreter.steps == 0


# -- events, cancelling, failing --------------------------------------------------------------------------------------


def test_events_are_one_a_token():
    engine = script.engine_of(script.Script([5, 6]), chunk=4)
    assert engine.step() == []
    (sequence,) = engine.add([1] * 6, SamplingParams(max_tokens=2))
    assert [engine.step() for _ in range(4)] == [[], [Event(sequence, 5, None)], [Event(sequence, 6, None)], []]


def test_serve_client_disconnect():
    interpreter = script.Script([5])
    engine = script.engine_of(interpreter, max_context=2000, max_seqs=1)
    (gone,), (waiting,) = (engine.add([1], SamplingParams(max_tokens=1000)) for _ in range(2))
    for _ in range(3):
        engine.step()
    assert waiting.phase is Phase.WAITING
    engine.cancel(gone)
    assert (gone.finish_reason, gone.blocks, len(gone.output_ids)) == (FinishReason.CANCELLED, [], 3)
    ((sequence, token, _),) = engine.step()
    assert (sequence, token) == (waiting, 5)
    engine.cancel(gone)
    engine.cancel(waiting)
    assert not engine.has_work
    assert engine.pool.num_held == 0


def test_cancel_during_prefill_and_while_a_step_runs():
    engine = script.engine_of(script.Script([5], before=lambda batch: engine.cancel(batch.sequences[-1])), chunk=4)
    first, second = (engine.add([i] * 10, SamplingParams(max_tokens=4))[0] for i in (1, 2))
    for _ in range(2):
        engine.step()
    script.check_books(engine, [first, second])
    script.finish(engine)
    assert {first.finish_reason, second.finish_reason} == {FinishReason.CANCELLED}
    assert engine.pool.num_held == 0


def test_a_failing_forward_ends_its_sequences_and_no_other():
    engine = script.engine_of(script.Hash(), max_seqs=1)
    failing, waiting = (engine.add([i], SamplingParams(max_tokens=2))[0] for i in (1, 2))
    working = engine.interpreter

    class Failing:
        def run(self, batch, kv_cache, taps=None):
            raise RuntimeError("out of luck")

    engine.interpreter = Failing()
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    assert (failing.finish_reason, failing.error, failing.blocks) == (FinishReason.ERROR, "out of luck", [])
    engine.interpreter = working
    script.finish(engine)
    assert waiting.finish_reason is FinishReason.LENGTH
    assert engine.pool.num_held == 0


def test_one_bad_row_of_logits_ends_one_sequence():
    class Sick(script.Script):
        def run(self, batch, kv_cache, taps=None):
            rows = np.array(super().run(batch, kv_cache, taps))
            for row, sequence in zip(rows, batch.sampled, strict=True):
                if sequence.prompt_ids == (13,):
                    row[:] = np.nan
            return rows

    engine = script.engine_of(Sick([5]))
    params = SamplingParams(temperature=1, max_tokens=3)
    (sick,), (well,) = engine.add([13], params), engine.add([1], params)
    events = engine.step()
    assert Event(sick, None, None) in events
    assert (sick.finish_reason, sick.output_ids) == (FinishReason.ERROR, [])
    assert "no distribution" in sick.error
    script.finish(engine)
    assert (well.output_ids, well.finish_reason) == ([5, 5, 5], FinishReason.LENGTH)
    assert engine.pool.num_held == 0


def test_an_interrupt_leaves_the_step_undone():
    class Interrupted(script.Hash):
        interrupted = False

        def run(self, batch, kv_cache, taps=None):
            if self.interrupted:
                self.interrupted = False
                raise KeyboardInterrupt
            return super().run(batch, kv_cache, taps)

    engine = script.engine_of(Interrupted())
    (sequence,) = engine.add([1, 2], SamplingParams(max_tokens=6))
    engine.step()
    engine.interpreter.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    script.check_books(engine, [sequence])
    script.finish(engine)
    assert sequence.output_ids == run(script.engine_of(script.Hash()), [1, 2], max_tokens=6).output_ids


# -- reuse, company, memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_kv_full_prefix_hit(count):
    prompt = list(range(count))
    engine, answers, cached = script.engine_of(script.Hash()), [], []
    for _ in range(3):
        sequence = run(engine, prompt, max_tokens=6)
        answers.append(sequence.output_ids)
        cached.append(sequence.cached_tokens)
    answers.append(run(script.engine_of(script.Hash(), prefix_cache=False), prompt, max_tokens=6).output_ids)
    assert all(answer == answers[0] for answer in answers)
    expected = (count - 1) // 4 * 4
    assert cached == [0, expected, expected]
    assert engine.stats.prompt_tokens >= 3


def test_serve_concurrent_requests():
    settings = [
        {},
        *({"temperature": 1, "seed": seed} for seed in range(4)),
        {"temperature": 1, "seed": 1, "top_k": 5},
        {"logit_bias": {3: 50}},
        {"repetition_penalty": 1.5, "temperature": 0.7, "seed": 2},
    ]
    prompts = [[i, 2, 3, 4, 5] for i in range(8)]
    serial = [
        run(script.engine_of(script.Hash()), p, max_tokens=9, **one).output_ids
        for p, one in zip(prompts, settings, strict=True)
    ]
    for _ in range(5):
        engine = script.engine_of(script.Hash(), num_blocks=200)
        together = [
            engine.add(p, SamplingParams(max_tokens=9, **one))[0] for p, one in zip(prompts, settings, strict=True)
        ]
        with pytest.raises(RequestError):
            engine.add([1], SamplingParams(logit_bias={500: 1}))
        script.finish(engine)
        assert [sequence.output_ids for sequence in together] == serial
        assert len({sequence.number for sequence in together}) == 8


def test_kv_memory_not_released():
    engine = script.engine_of(script.Hash(), num_blocks=40)
    rng = np.random.default_rng(0)
    for request in range(60):
        (sequence,) = engine.add(rng.integers(0, 97, 20).tolist(), SamplingParams(max_tokens=5))
        if request % 3 == 0:
            engine.step()
            engine.step()
            engine.cancel(sequence)
        script.finish(engine)
        assert engine.pool.num_held == 0
        assert engine.pool.num_cached <= 40
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting


def test_an_unseeded_request_can_be_repeated():
    engine = script.engine_of(script.Hash())
    first, second = (run(engine, temperature=1, max_tokens=8) for _ in range(2))
    assert first.seed != second.seed
    assert run(engine, temperature=1, max_tokens=8, seed=first.seed).output_ids == first.output_ids


def test_a_record_and_logprobs_for_every_token():
    engine = script.engine_of(script.Hash())
    (sequence,) = engine.add([1, 2], SamplingParams(temperature=1, seed=3, max_tokens=5, logprobs=2), record=True)
    records = []
    while engine.has_work:
        records += [event.record for event in engine.step()]
    assert records == sequence.record
    assert [record.token for record in records] == sequence.output_ids
    assert [record.position for record in records] == [2, 3, 4, 5, 6]
    assert [told.token for told in sequence.logprobs] == sequence.output_ids
    assert [told.raw for told in sequence.logprobs] == [record.logprob_raw for record in records]
    plain = run(script.engine_of(script.Hash()), [1, 2], temperature=1, seed=3, max_tokens=5)
    assert (plain.output_ids, plain.record, plain.logprobs) == (sequence.output_ids, None, None)


# -- forward and taps, on the real interpreter ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    program = decoder(CONFIG)
    return ReferenceProgram(program, tiny.random_weights(program))


def test_forward_gives_a_row_a_token_in_any_chunks(reference):
    ids = list(range(40))
    whole = script.engine_of(reference, k_type="f32", v_type="f32").forward(ids)
    assert whole.shape == (40, CONFIG.vocab)
    engine = script.engine_of(reference, chunk=7, k_type="f32", v_type="f32")
    np.testing.assert_allclose(engine.forward(ids), whole, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(engine.forward(ids, last_only=True), whole[-1:], rtol=1e-4, atol=1e-4)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.forward([1] * 64).shape == (64, CONFIG.vocab)
    with pytest.raises(ContextLengthError):
        engine.forward([1] * 65)


def test_forward_beside_sequences(reference):
    engine = script.engine_of(reference)
    (sequence,) = engine.add([1] * 30, SamplingParams(max_tokens=20))
    engine.step()
    engine.forward([2] * 20)
    with pytest.raises(RequestError, match="in use"):
        engine.forward([2] * 60)
    script.check_books(engine, [sequence])
    script.finish(engine)
    assert sequence.output_ids == run(script.engine_of(reference), [1] * 30, max_tokens=20).output_ids


def test_a_patched_run_is_never_shared(reference):
    program, prompt = decoder(CONFIG), list(range(20))
    clean = run(script.engine_of(reference), prompt, max_tokens=5).output_ids
    engine = script.engine_of(reference)
    patch = {"layers.0.attn.v": lambda tensor: -3 * tensor}
    (patched,) = engine.add(prompt, SamplingParams(max_tokens=5))
    while engine.has_work:
        engine.step(Taps(program, patch=patch))
    assert patched.output_ids != clean
    assert engine.pool.num_cached == 0
    assert run(engine, prompt, max_tokens=5).output_ids == clean


def test_a_recorded_run_computes_its_whole_prompt(reference):
    engine = script.engine_of(reference)
    run(engine, list(range(20)), max_tokens=2)
    taps = Taps(decoder(CONFIG), ["layers.1.residual"])
    (sequence,) = engine.add(list(range(20)), SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step(taps)
    assert sequence.cached_tokens == 0
    assert taps.recording["layers.1.residual"].shape == (21, CONFIG.hidden)


def test_an_error_in_a_tapped_run_leaves_nothing_behind(reference):
    def broken(tensor):
        raise ZeroDivisionError

    prompt = list(range(12))
    clean = run(script.engine_of(reference), prompt, max_tokens=6).output_ids
    engine = script.engine_of(reference)
    (sequence,) = engine.add(prompt, SamplingParams(max_tokens=6))
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step(Taps(decoder(CONFIG), patch={"layers.1.mlp.act": broken}))
    assert sequence.finish_reason is FinishReason.ERROR
    assert engine.pool.num_held == 0
    assert run(engine, prompt, max_tokens=6).output_ids == clean


# -- times ------------------------------------------------------------------------------------------------------------


def test_measure_rate_includes_prefill():
    clock = script.Clock()

    def pass_time(batch):
        clock.now += 2.0 if batch.num_tokens > 1 else 0.1

    engine = script.engine_of(script.Script([5], before=pass_time), max_context=600, clock=clock)
    clock.now += 30  # a warm-up before the request is not the request's
    sequence = run(engine, [i % 97 for i in range(500)], max_tokens=10)
    assert sequence.time_to_first_token_s == pytest.approx(2.0)
    assert sequence.prefill_rate == pytest.approx(250)
    assert sequence.decode_rate == pytest.approx(10)
    assert (engine.stats.prefill_s, engine.stats.decode_s) == pytest.approx((2.0, 0.9))
    assert (engine.stats.prompt_tokens, engine.stats.output_tokens) == (500, 10)

    again = run(engine, [i % 97 for i in range(500)], max_tokens=10)
    assert again.cached_tokens == 496
    assert again.prefill_rate == pytest.approx((500 - 496) / again.prefill_s)
    assert engine.stats.cached_tokens == 496


def test_waiting_in_the_queue_is_no_prefill():
    clock = script.Clock()

    def pass_time(batch):
        clock.now += 1

    engine = script.engine_of(script.Script([5], before=pass_time), max_seqs=1, clock=clock)
    _, (second,) = (engine.add([1, 2], SamplingParams(max_tokens=3)) for _ in range(2))
    script.finish(engine)
    assert (second.time_to_first_token_s, second.prefill_s, second.decode_s) == (4, 1, 2)


def test_one_token_has_no_rate():
    sequence = run(script.engine_of(script.Script([5]), clock=script.Clock()), max_tokens=1)
    assert (sequence.prefill_rate, sequence.decode_rate, sequence.decode_s) == (None, None, 0)
