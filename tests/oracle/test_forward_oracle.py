"""The forward pass against transformers, with the same dequantised weights.

The yardstick is a float64 run. An interpreter may be off from it by `FLOAT32_TIMES_TRANSFORMERS` times what
transformers' own float32 run is off, no more, on every config variant and on the real models.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import pytest
from steps import Stage
from tiny import K_QUANT_SCALE_AT, VARIANTS, random_weights
from tolerances import (
    EPS32,
    FLOAT32_TIMES_TRANSFORMERS,
    FLOAT64_RELATIVE_PER_LAYER,
    HIDDEN_ROUNDINGS,
    dot_product,
)

from cutaway.files.checkpoint import load
from cutaway.forward.decoder import decoder
from cutaway.forward.reference import ReferenceProgram
from cutaway.forward.taps import Taps
from cutaway.text.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers_oracle as oracle  # noqa: E402

INTERPRETERS = ("reference", "native")
CATALOGUE = {"qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b.gguf", "smollm2-135m": "smollm2-135m.gguf"}


def make(kind: str, program, weights, activations="f32"):
    """An interpreter, by default without any rounding of activations."""
    if kind == "reference":
        return ReferenceProgram(program, weights, activations)
    pytest.importorskip("cutaway.forward.native", exc_type=ImportError)
    from cutaway.forward.native import NativeProgram

    return NativeProgram(program, weights, activations=activations, threads=2, max_context=1024)


class Case:
    """One model: a sequence, transformers' two runs over it, and how far float32 is off."""

    def __init__(self, program, weights, ids) -> None:
        self.program, self.weights, self.ids = program, weights, ids
        self.narrow = oracle.run(oracle.build(program, weights, torch.float32), program, ids)
        self.wide = oracle.run(oracle.build(program, weights, torch.float64), program, ids)
        self.logit_tolerance = FLOAT32_TIMES_TRANSFORMERS * off(self.narrow.logits, self.wide.logits)


def off(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(np.float64) - b).max())


def typical(a: np.ndarray, b: np.ndarray) -> float:
    """The root mean square of a row's difference, of the row in the middle."""
    return float(np.median(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2, axis=1))))


@functools.cache
def tiny_case(variant: str, format: str = "F32") -> Case:
    config = VARIANTS[variant]
    program = decoder(config)
    ids = np.random.default_rng(1).integers(0, config.vocab, 90)
    return Case(program, random_weights(program, format), ids)


@pytest.fixture(scope="module", params=CATALOGUE)
def real_case(request) -> Case:
    return load_real(request.param)


def catalogue_path(name: str) -> Path:
    home = Path(os.environ.get("CUTAWAY_HOME", Path.home() / ".cache" / "cutaway"))
    path = home / "models" / CATALOGUE[name]
    if not path.exists():
        pytest.skip(f"{path} is not there (cutaway pull {name})")
    return path


@functools.cache
def load_real(name: str) -> Case:
    checkpoint = load(catalogue_path(name))
    program = decoder(checkpoint.config)
    return Case(program, checkpoint.weights, np.random.default_rng(2).integers(0, 40_000, 64))


def check(kind: str, case: Case, chunk: int | None = None) -> None:
    """Logits and every hidden state of an interpreter, against the yardstick."""
    taps = Taps(case.program, record=oracle.hidden_names(case.program))
    stage = Stage(make(kind, case.program, case.weights), case.program.config, "f32")
    logits = stage.logits(case.ids, chunk, taps=taps)
    assert off(logits, case.wide.logits) <= case.logit_tolerance
    largest = 0.0
    for name, wide in case.wide.hidden.items():
        ours, theirs = taps.recording[name], case.narrow.hidden[name]
        largest = max(largest, float(np.abs(wide).max()))  # what was rounded when the stream was large stays in it
        allowed = max(FLOAT32_TIMES_TRANSFORMERS * off(theirs, wide), HIDDEN_ROUNDINGS * EPS32 * largest)
        assert off(ours, wide) <= allowed, name
        assert typical(ours, wide) <= FLOAT32_TIMES_TRANSFORMERS * typical(theirs, wide), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_logits_and_hidden_states_of_every_config_variant(kind, variant):
    check(kind, tiny_case(variant))


@pytest.mark.parametrize("kind", INTERPRETERS)
def test_the_same_one_token_at_a_time(kind):
    check(kind, tiny_case("qwen2"), chunk=1)


@pytest.mark.parametrize("format", ["mixed", "Q4_0", "Q5_1", "Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_quantised_weights_are_the_weights_they_dequantise_to(kind, format):
    check(kind, tiny_case("qwen2", format))


@pytest.mark.parametrize("format", K_QUANT_SCALE_AT)
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_k_formats_are_the_weights_they_dequantise_to(kind, format):
    check(kind, tiny_case("qwen2-rows-of-256", format))


@pytest.mark.parametrize("format", ["mixed", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANT_SCALE_AT])
def test_int8_activations_are_those_of_the_definition(format):
    """Native against reference, both with int8 activations, every token a sequence of its own. Where a value lies at
    the border of two codes they may round it apart, which moves that row by what int8 is off; the typical row not."""
    case = tiny_case("qwen2-rows-of-256" if format in K_QUANT_SCALE_AT else "qwen2", format)

    def logits(kind: str, activations: str) -> np.ndarray:
        interpreter = make(kind, case.program, case.weights, activations)
        stage = Stage(interpreter, case.program.config, "f32", num_blocks=len(case.ids))
        return np.concatenate(list(stage.feed({f"{i}": [token] for i, token in enumerate(case.ids)}).values()))

    native, reference, exact = logits("native", "int8"), logits("reference", "int8"), logits("reference", "f32")
    bound = FLOAT32_TIMES_TRANSFORMERS * typical(case.narrow.logits, case.wide.logits)
    assert typical(native, reference) <= bound
    assert typical(reference, exact) > 100 * bound, "int8 must show"
    assert off(native, reference) <= off(reference, exact)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_float64_runs_written_apart_agree(variant):
    """The yardstick itself: our definitions in float64 against transformers widened to float64."""
    case = tiny_case(variant)
    stage = Stage(ReferenceProgram(case.program, case.weights, dtype=np.float64), case.program.config, "f64")
    bound = FLOAT64_RELATIVE_PER_LAYER * case.program.config.num_layers * np.abs(case.wide.logits).max()
    assert off(stage.logits(case.ids), case.wide.logits) <= bound


PATCHED = ("attn_norm", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down", "residual")


@pytest.mark.parametrize("name", ["embed", *(f"layers.0.{name}" for name in PATCHED), "final_norm", "logits"])
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_patching_a_tap_is_a_hook_in_transformers(kind, name):
    case = tiny_case("qwen2")
    module = case.program[name].module

    def patch(x: np.ndarray) -> np.ndarray:
        x[3:7] = -0.5 * x[3:7]
        return x

    runs = []
    for dtype in (torch.float32, torch.float64):
        model = oracle.build(case.program, case.weights, dtype)
        with oracle.hooked(model, module, patch):
            runs.append(oracle.run(model, case.program, case.ids).logits)
    narrow, wide = runs
    assert off(wide, case.wide.logits) > 1e-2, "the patch does nothing"
    stage = Stage(make(kind, case.program, case.weights), case.program.config, "f32")
    patched = stage.logits(case.ids, taps=Taps(case.program, patch={name: patch}))
    assert off(patched, wide) <= FLOAT32_TIMES_TRANSFORMERS * off(narrow, wide)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama-all-biases"])
def test_a_tensor_is_what_the_module_it_names_makes(variant):
    """`Op.module`: for all operations that name one, the module's output in transformers is our tensor."""
    case = tiny_case(variant)
    taps = Taps(case.program, record=["*"])
    Stage(make("reference", case.program, case.weights), case.program.config, "f32").logits(case.ids, taps=taps)
    model = oracle.build(case.program, case.weights, torch.float32)
    outputs: dict[str, np.ndarray] = {}

    def keep(name):
        def hook(_module, _inputs, output):
            first = output[0] if isinstance(output, tuple) else output
            outputs[name] = first.reshape(len(case.ids), -1).numpy()

        return hook

    named = [op for op in case.program if op.module]
    for op in named:
        model.get_submodule(op.module).register_forward_hook(keep(op.name))
    oracle.run(model, case.program, case.ids)
    assert len(outputs) == len(named) > 20
    for name, theirs in outputs.items():
        assert off(taps.recording[name], theirs) <= dot_product(case.program.config.hidden) * np.abs(theirs).max(), name


# -- the real models ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_the_real_models(kind, real_case):
    check(kind, real_case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERPRETERS)
def test_hello_through_the_real_model(kind):
    """One token: the embedding, 24 layers of its shape, one row of logits, as the taps see them."""
    checkpoint = load(catalogue_path("qwen2.5-coder-0.5b"))
    program, ids = decoder(checkpoint.config), Tokenizer(checkpoint.vocabulary).encode("hello")
    assert len(ids) == 1
    taps = Taps(program, record=["embed", "layers.*.residual", "logits"])
    Stage(make(kind, program, checkpoint.weights), checkpoint.config, "f32").logits(ids, taps=taps)
    shapes = {name: taps.recording[name].shape for name in taps.recording.names}
    assert list(shapes) == ["embed", *(f"layers.{i}.residual" for i in range(24)), "logits"]
    assert shapes.pop("logits") == (1, 151936)
    assert set(shapes.values()) == {(1, 896)}
    embedding = checkpoint.weights["embed.weight"].dequantize()[ids]
    assert np.array_equal(taps.recording["embed"], embedding)


@pytest.mark.slow
def test_the_yardstick_of_the_real_models(real_case):
    case = real_case
    stage = Stage(ReferenceProgram(case.program, case.weights, dtype=np.float64), case.program.config, "f64")
    bound = FLOAT64_RELATIVE_PER_LAYER * case.program.config.num_layers * np.abs(case.wide.logits).max()
    assert off(stage.logits(case.ids), case.wide.logits) <= bound


PROMPTS = (
    "用一句话介绍什么是 Transformer。",
    "写一个判断质数的 Python 函数。",
    "床前明月光，下一句是什么？",
    "def quicksort(items):",
    "Explain in one sentence what a KV cache is.",
)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(prompt, greedy_model):
    """64 greedy tokens. Where another token is chosen, transformers' own two best logits must lie within tolerance."""
    program, stage, encode, model, tolerance = greedy_model
    ids = encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    answer: list[int] = []
    logits = stage.feed({prompt: ids}, "last")[prompt]
    for _ in range(64):
        answer.append(int(logits[-1].argmax()))
        logits = stage.feed({prompt: answer[-1:]}, "last")[prompt]
    theirs = oracle.run(model, program, ids + answer).logits[len(ids) - 1 : -1]  # [64, vocab], along the same text
    for step, token in enumerate(answer):
        best = theirs[step].max()
        assert best - theirs[step, token] <= tolerance, f"step {step}: {token} for {theirs[step].argmax()}"
    assert len(set(answer)) > 10, "no text worth comparing"


@pytest.fixture(scope="module")
def greedy_model():
    case = load_real("qwen2.5-coder-0.5b")
    tokenizer = Tokenizer(load(catalogue_path("qwen2.5-coder-0.5b")).vocabulary)
    stage = Stage(make("native", case.program, case.weights), case.program.config, "f32")
    model = oracle.build(case.program, case.weights, torch.float32)
    return case.program, stage, functools.partial(tokenizer.encode, special=True), model, case.logit_tolerance
