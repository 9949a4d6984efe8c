"""What a trace shows against transformers with the same weights: the residual stream, the lens, attention, patches.

The yardstick is transformers in float64; ours may be off from it by `FLOAT32_TIMES_TRANSFORMERS` times what
transformers' own float32 is off.
"""

from __future__ import annotations

import functools
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
    llm: FakeLLM
    ids: list[int]
    narrow_model: Any
    narrow: Seen
    wide: Seen


@functools.cache
def case(variant: str) -> Case:
    llm = FakeLLM(VARIANTS[variant])
    ids = [int(i) for i in np.random.default_rng(3).integers(0, llm.config.vocab, 40)]
    narrow, wide = (oracle.build(llm.program, llm.checkpoint.weights, d) for d in (torch.float32, torch.float64))
    return Case(llm, ids, narrow, look(narrow, ids), look(wide, ids))


@pytest.fixture(params=NAMES)
def seen(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def close(ours: np.ndarray, narrow: np.ndarray, wide: np.ndarray) -> None:
    assert ours.shape == narrow.shape == wide.shape
    rounding = HIDDEN_ROUNDINGS * EPS32 * float(np.abs(wide).max())
    allowed = FLOAT32_TIMES_TRANSFORMERS * float(np.abs(narrow - wide).max()) + rounding
    assert float(np.abs(ours - wide).max()) <= allowed


def test_residual_stream(seen: Case) -> None:
    found = trace(seen.llm, seen.ids, ["embed", "*residual"], lens_positions=None)
    states = residual_states(seen.llm.program)
    assert sorted(seen.wide.states) == sorted(states)
    for at, name in enumerate(states):
        close(found.tensors[name], seen.narrow.states[name], seen.wide.states[name])
        lengths = [np.linalg.norm(side.states[name], axis=1) for side in (seen.narrow, seen.wide)]
        close(found.residual.norms[at], *lengths)


def test_hidden_states_are_layers_plus_one_and_the_last_is_normed(seen: Case, tmp_path: Path) -> None:
    layers = seen.llm.config.num_layers
    assert len(seen.wide.hidden_states) == layers + 1
    path = tmp_path / "theirs.npz"
    np.savez(path, logits=seen.wide.logits, **{f"hidden_states.{i}": h for i, h in enumerate(seen.wide.hidden_states)})
    theirs, left_over = from_hugging_face(load_tensors(path), seen.llm.program)
    assert left_over == ()
    ours = record(seen.llm, seen.ids)
    found = diff(seen.llm.program, theirs, ours, tolerance=1e-5)
    assert [tap.name for tap in found.taps] == ["embed", "layers.0.residual", "final_norm", "logits"]
    assert found.first is None
    # Taking the last hidden state for the last layer's residual is the classic mistake: it is far off.
    wrong = diff(seen.llm.program, {"layers.1.residual": seen.wide.hidden_states[-1]}, ours, tolerance=1e-1)
    assert wrong.first is not None


def test_lens(seen: Case) -> None:
    positions = [0, 7, 39]
    found = trace(seen.llm, seen.ids, lens_positions=positions, lens_top=3).lens
    assert found is not None
    answers = seen.wide.logits[positions].argmax(axis=1)
    assert found.answers.tolist() == answers.tolist()
    for at, name in enumerate(found.states):
        narrow, wide = (side.lens[name][positions] for side in (seen.narrow, seen.wide))
        close(
            found.answer_logprob[at],
            *(np.take_along_axis(rows, answers[:, None], axis=1)[:, 0] for rows in (narrow, wide)),
        )
        best = np.argsort(-wide, axis=1)[:, :3]
        assert found.ids[at].tolist() == best.tolist()
        close(found.logprobs[at], *(np.take_along_axis(rows, best, axis=1) for rows in (narrow, wide)))
    # The last state, read through the lens, is the model.
    np.testing.assert_allclose(found.answer_logprob[-1], log_softmax(seen.wide.logits)[positions, answers], atol=1e-5)


def test_attention(seen: Case) -> None:
    config = seen.llm.config
    everything = [(layer, None) for layer in range(config.num_layers)]
    found = trace(seen.llm, seen.ids, lens_positions=None, attention=everything).attention
    assert [m.layer for m in found] == list(range(config.num_layers))
    for layer, ours in enumerate(found):
        assert ours.weights.shape == (config.num_heads, 40, 40)
        close(ours.weights, seen.narrow.attentions[layer], seen.wide.attentions[layer])


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
