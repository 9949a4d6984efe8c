"""Against transformers: the real models' weights as its own GGUF reader dequantises and permutes them."""

import os

import numpy as np
import pytest
from tiny import module_weights

from cutaway.files import store
from cutaway.files.checkpoint import load
from cutaway.forward.decoder import decoder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_every_weight_is_the_one_transformers_reads(name):
    transformers = pytest.importorskip("transformers")
    path = store.resolve(name)
    checkpoint = load(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(os.fspath(path.parent), gguf_file=path.name)
    state = model.state_dict()
    names = module_weights(decoder(checkpoint.config))
    assert set(names) == {key for key in state if "rotary" not in key} - (
        {"lm_head.weight"} if checkpoint.config.tied_head and "lm_head.weight" not in names else set()
    )
    for theirs, ours in names.items():
        assert np.array_equal(state[theirs].float().numpy(), checkpoint.weights[ours].dequantize()), ours
    config, theirs = checkpoint.config, model.config
    assert (config.vocab, config.hidden, config.num_layers) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
    )
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
