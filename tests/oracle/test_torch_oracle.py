"""The PyTorch interpreter: its logits against the reference and the kernels, its gradients against transformers."""

import numpy as np
import pytest
import steps
import tiny
import tolerances

from cutaway.errors import KernelError, UnsupportedError
from cutaway.forward.decoder import decoder
from cutaway.forward.program import Program
from cutaway.forward.reference import ReferenceProgram
from cutaway.forward.taps import Taps

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers_oracle as oracle  # noqa: E402

from cutaway.forward.torch import TorchProgram  # noqa: E402

CONFIGS = ("qwen2", "qwen2-untied", "qwen2-group-7", "qwen3", "llama-all-biases", "llama-llama3")
GRID = (3, 17)  # rows, tokens


def values(weights):
    return {name: weight.dequantize() for name, weight in weights.items()}


def grid(config, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab, GRID)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers(name):
    config = tiny.VARIANTS[name]
    program = decoder(config)
    weights = tiny.random_weights(program)
    ids = torch.from_numpy(grid(config))
    targets = torch.from_numpy(grid(config, 1))

    ours = TorchProgram(program, values(weights))
    loss = torch.nn.functional.cross_entropy(ours.forward(ids), targets.reshape(-1))
    loss.backward()

    model = tiny.transformers_model(program, weights).requires_grad_(True)
    model.tie_weights()  # the weights were put in one by one
    logits = model(input_ids=ids, use_cache=False).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))
    theirs.backward()

    assert float(loss.detach()) == pytest.approx(float(theirs.detach()), rel=tolerances.GRADIENT_RELATIVE)
    modules = {ours_: key for key, ours_ in tiny.module_weights(program).items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for weight in program.weight_shapes:
        got, want = ours.gradient(weight), parameters[modules[weight]].grad
        assert float((got - want).norm()) <= tolerances.GRADIENT_RELATIVE * float(want.norm()), weight


@pytest.mark.parametrize("interpreter", ["reference", "native"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_other_interpreters(name, interpreter):
    config = tiny.VARIANTS[name]
    program = decoder(config)
    weights = tiny.random_weights(program)
    ids = grid(config)
    wide = np.concatenate(
        [oracle.run(oracle.build(program, weights, torch.float64), program, row).logits for row in ids]
    )
    narrow = np.concatenate(
        [oracle.run(oracle.build(program, weights, torch.float32), program, row).logits for row in ids]
    )
    allowed = tolerances.FLOAT32_TIMES_TRANSFORMERS * np.abs(narrow - wide).max()

    got = TorchProgram(program, values(weights)).forward(torch.from_numpy(ids)).detach().numpy()

    made = ReferenceProgram(program, weights) if interpreter == "reference" else native(program, weights)
    other = np.concatenate([steps.Stage(made, config, kv_type="f32").logits(row) for row in ids])
    assert np.abs(got - wide).max() <= allowed
    assert np.abs(got - other).max() <= 2 * allowed  # each is off from the float64 run by that at most


def native(program, weights):
    module = pytest.importorskip("cutaway.forward.native", exc_type=ImportError)
    return module.NativeProgram(program, weights, activations="f32", threads=1, max_context=64)


def test_a_tap_sees_and_replaces_a_tensor_of_a_group():
    program = decoder(tiny.TINY)
    weights = tiny.random_weights(program)
    ids = grid(tiny.TINY)
    run = TorchProgram(program, values(weights))
    taps = Taps(program, ["layers.0.attn.k", "layers.1.residual"], {"layers.0.attn.k": lambda k: np.zeros_like(k)})
    patched = run.forward(torch.from_numpy(ids), taps).detach().numpy()
    made = ReferenceProgram(program, weights)
    same = Taps(program, [], {"layers.0.attn.k": lambda k: np.zeros_like(k)})
    want = np.concatenate([steps.Stage(made, tiny.TINY, kv_type="f32").logits(row, taps=same) for row in ids])
    assert taps.recording["layers.0.attn.k"].max() == 0
    assert taps.recording["layers.1.residual"].shape == (ids.size, tiny.TINY.hidden)
    assert np.abs(patched - want).max() <= 1e-4 * np.abs(want).max()


def test_a_weight_of_another_shape_is_refused():
    program = decoder(tiny.TINY)
    weights = values(tiny.random_weights(program))
    with pytest.raises(KernelError, match=r"weight layers.1.attn.v.weight: found \(3, 4\), expected \(32, 64\)"):
        TorchProgram(program, weights | {"layers.1.attn.v.weight": np.zeros((3, 4), np.float32)})


def test_an_attribute_it_cannot_compute_is_refused_and_a_scale_is_obeyed():
    def one(**told):
        p = Program(tiny.TINY)
        h = p.embed("embed", "model.embed_tokens")
        q = p.linear("attn.q", h, 64, "")
        k, v = p.linear("attn.k", h, 32, ""), p.linear("attn.v", h, 32, "")
        with p.layer(0):
            p.attention("attn.mix", q, k, v, **told)
        return p

    with pytest.raises(UnsupportedError, match=r"PyTorch interpreter cannot compute attention .*softcap: found 5.0"):
        TorchProgram(one(softcap=5.0), values(tiny.random_weights(one())))
    weights, ids = tiny.random_weights(one()), grid(tiny.TINY)
    want = steps.Stage(ReferenceProgram(one(scale=1.5), weights), tiny.TINY, kv_type="f32").logits(ids[0])
    got = TorchProgram(one(scale=1.5), values(weights)).forward(torch.from_numpy(ids[:1])).detach().numpy()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
