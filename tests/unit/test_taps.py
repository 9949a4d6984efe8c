"""Taps: record any tensor, replace any tensor, and leave nothing behind."""

from collections.abc import Callable

import numpy as np
import pytest
from steps import Stage
from tiny import TINY, random_weights

from cutaway.errors import RequestError
from cutaway.forward.decoder import decoder
from cutaway.forward.reference import ReferenceProgram
from cutaway.forward.taps import Taps, matching

PROGRAM = decoder(TINY)
WEIGHTS = random_weights(PROGRAM)
IDS = [5, 17, 96, 0, 41, 8]


@pytest.fixture(params=["reference", "native"])
def stage(request) -> Callable[[], Stage]:
    """Makes a fresh KV cache before one and the same interpreter, which what came before must not have marked."""
    if request.param == "native":
        native = pytest.importorskip("cutaway.forward.native", exc_type=ImportError)
        interpreter = native.NativeProgram(PROGRAM, WEIGHTS, activations="int8", threads=2, max_context=64)
    else:
        interpreter = ReferenceProgram(PROGRAM, WEIGHTS)
    return lambda: Stage(interpreter, TINY)


def test_patterns_are_matched_in_order_of_execution():
    assert matching(PROGRAM, ["layers.*.attn.q", "embed"]) == ["embed", "layers.0.attn.q", "layers.1.attn.q"]
    assert matching(PROGRAM, ["logits", "logits", "log*"]) == ["logits"]
    assert matching(PROGRAM, ["*"]) == PROGRAM.names
    assert matching(PROGRAM, []) == []


@pytest.mark.parametrize("pattern", ["layers.2.attn.q", "layer.*", "", "Embed"])
def test_a_pattern_that_matches_nothing_is_refused(pattern):
    with pytest.raises(RequestError) as caught:
        Taps(PROGRAM, record=["embed", pattern])
    assert caught.value.param == "tap"
    assert repr(pattern) in str(caught.value)


def test_everything_recorded_has_the_shape_the_program_says(stage):
    taps = Taps(PROGRAM, record=["*"])
    logits = stage().logits(IDS, taps=taps)
    recording = taps.recording
    assert recording.names == PROGRAM.names
    for op in PROGRAM:
        assert recording[op.name].shape == op.shape(len(IDS), len(IDS))
    assert np.array_equal(recording["logits"], logits)
    assert recording.nbytes == sum(recording[name].nbytes for name in recording.names)


def test_steps_are_kept_one_after_another(stage):
    taps = Taps(PROGRAM, record=["layers.1.residual"])
    stage().logits(IDS, chunk=4, taps=taps)
    assert [len(step) for step in taps.recording.steps["layers.1.residual"]] == [4, 2]
    assert [list(positions) for positions in taps.recording.positions] == [[0, 1, 2, 3], [4, 5]]
    assert taps.recording["layers.1.residual"].shape == (6, 64)


def test_recording_changes_nothing(stage):
    assert np.array_equal(stage().logits(IDS), stage().logits(IDS, taps=Taps(PROGRAM, record=["*"])))


def test_what_was_not_recorded_is_named(stage):
    taps = Taps(PROGRAM, record=["embed"])
    stage().logits(IDS, taps=taps)
    assert "embed" in taps.recording
    assert "logits" not in taps.recording
    with pytest.raises(KeyError, match=r"logits was not recorded; recorded: embed"):
        taps.recording["logits"]


def test_a_patched_tensor_goes_on_and_is_what_is_recorded(stage):
    names = ["layers.0.mlp.down", "layers.0.residual", "layers.0.attn_residual"]
    taps = Taps(PROGRAM, record=names, patch={"layers.0.mlp.down": np.zeros_like})
    logits = stage().logits(IDS, taps=taps)
    assert not taps.recording["layers.0.mlp.down"].any()
    assert np.array_equal(taps.recording["layers.0.residual"], taps.recording["layers.0.attn_residual"])
    assert not np.allclose(logits, stage().logits(IDS))


def test_a_patch_of_the_logits_is_what_the_caller_gets(stage):
    taps = Taps(PROGRAM, patch={"logits": lambda x: x * 0 + 3})
    assert (stage().logits(IDS, taps=taps) == 3).all()


def test_patching_a_key_changes_later_tokens_and_no_earlier_one(stage):
    def turn(x):
        x[2] = -x[2]
        return x

    plain, patched = stage().logits(IDS), stage().logits(IDS, taps=Taps(PROGRAM, patch={"layers.0.attn.k": turn}))
    assert np.array_equal(plain[:2], patched[:2])
    assert (np.abs(plain - patched).max(axis=1)[2:] > 1e-3).all()


def test_patches_of_one_tensor_run_one_after_another(stage):
    taps = Taps(PROGRAM, patch={"log*": lambda x: x + 1, "logits": lambda x: x * 2})
    assert np.array_equal(stage().logits(IDS, taps=taps), (stage().logits(IDS) + 1) * 2)


def test_a_patch_that_gives_back_none_leaves_the_tensor_even_if_it_wrote_into_it(stage):
    def scribble(x):
        x[:] = np.nan

    taps = Taps(PROGRAM, record=["embed"], patch={"embed": scribble})
    assert np.array_equal(stage().logits(IDS, taps=taps), stage().logits(IDS))
    assert not np.isnan(taps.recording["embed"]).any()


def test_a_recording_is_a_copy_for_interpreters_use_their_buffers_again():
    taps = Taps(PROGRAM, record=["embed"])
    buffer = np.ones((2, 64), np.float32)
    assert taps.visit("embed", buffer) is None
    buffer[:] = 7
    assert (taps.recording["embed"] == 1).all()


@pytest.mark.parametrize("wrong", [lambda x: x[:-1], lambda x: x[:, :-1], lambda x: x[None], lambda x: 1.0])
def test_a_patch_of_the_wrong_shape_is_refused(stage, wrong):
    with pytest.raises(RequestError, match=r"patch of layers\.0\.attn\.q has the wrong shape") as caught:
        stage().logits(IDS, taps=Taps(PROGRAM, patch={"layers.0.attn.q": wrong}))
    assert caught.value.param == "patch"


class BrokenPatchError(Exception):
    pass


def test_an_error_inside_a_patch_reaches_the_caller_and_leaves_nothing_behind(stage):
    def fails(x):
        x[:] = np.nan
        raise BrokenPatchError

    fresh, used = stage(), stage()
    with pytest.raises(BrokenPatchError):
        used.interpreter.run(used.batch({"a": IDS}), used.kv_cache, Taps(PROGRAM, patch={"layers.1.attn.v": fails}))
    used.sequences["a"].length = 0  # what the step had planned has not happened
    assert np.array_equal(used.logits(IDS), fresh.logits(IDS))
    assert np.array_equal(used.logits([1, 2], name="b"), fresh.logits([1, 2], name="b"))


def test_an_error_inside_a_patch_takes_its_step_out_of_the_recording(stage):
    broken = False

    def sometimes(x):
        if broken:
            raise BrokenPatchError

    used = stage()
    taps = Taps(PROGRAM, record=["layers.*.attn.q"], patch={"layers.1.attn.v": sometimes})
    used.interpreter.run(used.batch({"a": IDS}), used.kv_cache, taps)
    kept = taps.recording["layers.0.attn.q"].copy()
    broken = True
    with pytest.raises(BrokenPatchError):
        used.interpreter.run(used.batch({"b": IDS}), used.kv_cache, taps)
    np.testing.assert_array_equal(taps.recording["layers.0.attn.q"], kept)
    assert len(taps.recording.positions) == 1
