"""What a trace shows against transformers with the same weights: the residual stream, the lens, attention, patches.

The yardstick is transformers in float64; ours may be off from it by `FLOAT32_TIMES_TRANSFORMERS` times what
transformers' own float32 is off.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_llm import FakeLLM
from tiny import VARIANTS
from tolerances import EPS32, FLOAT32_TIMES_TRANSFORMERS, HIDDEN_ROUNDINGS

from cutaway.experiments.diff import diff, record
from cutaway.experiments.distributions import log_softmax
from cutaway.experiments.lens import residual_states
from cutaway.experiments.tensors import from_hugging_face, load_tensors
from cutaway.experiments.trace import trace
from cutaway.llm import LLM

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers_oracle as oracle  # noqa: E402

NAMES = ("qwen2", "qwen2-group-7", "qwen3-untied-explicit-head-dim", "llama-all-biases", "llama-yarn-mscale")


@dataclass
class Seen:
    """One forward pass of transformers, opened with its own means."""

    hidden_states: list[np.ndarray]
    states: dict[str, np.ndarray]  # the residual stream by our names, before the final norm
    lens: dict[str, np.ndarray]  # log-probabilities of each of them through its norm and head
    attentions: list[np.ndarray]
    logits: np.ndarray


def look(model: Any, ids: list[int]) -> Seen:
    states: dict[str, np.ndarray] = {}
    handles = []
    for i, layer in enumerate(model.model.layers):
        handles.append(
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda _, inputs, i=i: states.update({f"layers.{i}.attn_residual": inputs[0][0]})
            )
        )
        handles.append(
            layer.register_forward_hook(
                lambda _, __, out, i=i: states.update({f"layers.{i}.residual": out[0] if out.ndim == 3 else out})
            )
        )
    try:
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True, use_cache=False)
            states["embed"] = out.hidden_states[0][0]
            lens = {name: log_softmax(model.lm_head(model.model.norm(x)).numpy()) for name, x in states.items()}
    finally:
        for handle in handles:
            handle.remove()
    return Seen(
        [state[0].numpy() for state in out.hidden_states],
        {name: state.numpy() for name, state in states.items()},
        lens,
        [weights[0].numpy() for weights in out.attentions],
        out.logits[0].numpy(),
    )


@dataclass
class Case:
    llm: FakeLLM | LLM
    ids: list[int]
    narrow_model: Any
    narrow: Seen
    wide: Seen


@functools.cache
def case(variant: str) -> Case:
    llm = FakeLLM(VARIANTS[variant]) if variant in VARIANTS else real(variant)
    ids = [int(i) for i in np.random.default_rng(3).integers(0, llm.config.vocab, 40)]
    narrow, wide = (oracle.build(llm.program, llm.checkpoint.weights, d) for d in (torch.float32, torch.float64))
    return Case(llm, ids, narrow, look(narrow, ids), look(wide, ids))


def real(name: str) -> LLM:
    """A catalogue model in the native interpreter, without any rounding of activations, keys and values."""
    pytest.importorskip("cutaway.forward.native", exc_type=ImportError)
    home = Path(os.environ.get("CUTAWAY_HOME", Path.home() / ".cache" / "cutaway"))
    if not (home / "models" / f"{name}.gguf").is_file():
        pytest.skip(f"{name} is not here: cutaway pull {name}")
    return LLM(name, activations="f32", kv_type="f32", max_context=256, threads=2)


@pytest.fixture(params=[*NAMES, pytest.param("smollm2-135m", marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def allowed(narrow: np.ndarray, wide: np.ndarray, largest: float = 0.0) -> float:
    """What a float32 computation may be off; `largest` is a value that was rounded on the way and stays in the sum."""
    rounding = HIDDEN_ROUNDINGS * EPS32 * max(largest, float(np.abs(wide).max()))
    return FLOAT32_TIMES_TRANSFORMERS * float(np.abs(narrow - wide).max()) + rounding


def off(ours: np.ndarray, wide: np.ndarray) -> float:
    assert ours.shape == wide.shape
    return float(np.abs(ours - wide).max())


def test_residual_stream(seen: Case) -> None:
    found = trace(seen.llm, seen.ids, ["embed", "*residual"], lens_positions=None)
    states = residual_states(seen.llm.program)
    assert sorted(seen.wide.states) == sorted(states)
    largest = 0.0
    for at, name in enumerate(states):
        narrow, wide = seen.narrow.states[name], seen.wide.states[name]
        largest = max(largest, float(np.abs(wide).max()))
        assert off(found.tensors[name], wide) <= allowed(narrow, wide, largest)
        lengths = [np.linalg.norm(side.astype(np.float64), axis=1) for side in (narrow, wide)]
        assert off(found.residual.norms[at], lengths[1]) <= allowed(*lengths, largest)


def test_hidden_states_are_layers_plus_one_and_the_last_is_normed(seen: Case, tmp_path: Path) -> None:
    layers = seen.llm.config.num_layers
    assert len(seen.wide.hidden_states) == layers + 1
    path = tmp_path / "theirs.npz"
    np.savez(path, logits=seen.wide.logits, **{f"hidden_states.{i}": h for i, h in enumerate(seen.wide.hidden_states)})
    theirs, left_over = from_hugging_face(load_tensors(path), seen.llm.program)
    assert left_over == ()
    ours = record(seen.llm, seen.ids)
    found = diff(seen.llm.program, theirs, ours, tolerance=1e-5)
    between = [f"layers.{i}.residual" for i in range(layers - 1)]
    assert [tap.name for tap in found.taps] == ["embed", *between, "final_norm", "logits"]
    assert found.first is None
    # Taking the last hidden state for the last layer's residual is the classic mistake: it is far off.
    last = {f"layers.{layers - 1}.residual": seen.wide.hidden_states[-1]}
    wrong = diff(seen.llm.program, last, ours, tolerance=1e-1)
    assert wrong.first is not None


def test_lens(seen: Case) -> None:
    positions = [0, 7, 39]
    found = trace(seen.llm, seen.ids, lens_positions=positions, lens_top=3).lens
    assert found is not None
    answers = seen.wide.logits[positions].argmax(axis=1)
    assert found.answers.tolist() == answers.tolist()
    for at, name in enumerate(found.states):
        narrow, wide = (side.lens[name][positions] for side in (seen.narrow, seen.wide))
        limit = allowed(narrow, wide)  # over the whole vocabulary
        assert off(found.answer_logprob[at], np.take_along_axis(wide, answers[:, None], axis=1)[:, 0]) <= limit
        assert off(found.logprobs[at], np.take_along_axis(wide, found.ids[at], axis=1)) <= limit
        assert off(found.logprobs[at], -np.sort(-wide, axis=1)[:, :3]) <= limit
    # The last state, read through the lens, is the model.
    np.testing.assert_allclose(found.answer_logprob[-1], log_softmax(seen.wide.logits)[positions, answers], atol=1e-5)


def test_attention(seen: Case) -> None:
    config = seen.llm.config
    everything = [(layer, None) for layer in range(config.num_layers)]
    found = trace(seen.llm, seen.ids, lens_positions=None, attention=everything).attention
    assert [m.layer for m in found] == list(range(config.num_layers))
    for layer, ours in enumerate(found):
        assert ours.weights.shape == (config.num_heads, 40, 40)
        narrow, wide = seen.narrow.attentions[layer], seen.wide.attentions[layer]
        assert off(ours.weights, wide) <= allowed(narrow, wide)


@pytest.mark.parametrize("tap", ["layers.0.mlp.down", "layers.1.attn.v", "layers.0.residual", "embed"])
def test_a_patch_is_a_hook(seen: Case, tap: str) -> None:
    """The value that tap had on another prompt, put into this one."""
    llm = seen.llm
    other = [(i * 7 + 1) % llm.config.vocab for i in seen.ids]
    value = trace(llm, other, [tap], lens_positions=None).tensors[tap]
    ours = trace(llm, seen.ids, ["logits"], lens_positions=None, patch={tap: lambda _: value}).tensors["logits"]
    with oracle.hooked(seen.narrow_model, llm.program[tap].module, lambda _: value):
        theirs = oracle.run(seen.narrow_model, llm.program, seen.ids).logits
    rounding = FLOAT32_TIMES_TRANSFORMERS * float(np.abs(seen.narrow.logits - seen.wide.logits).max())
    assert float(np.abs(ours - theirs).max()) <= rounding
    assert float(np.abs(theirs - seen.narrow.logits).max()) > 100 * rounding
