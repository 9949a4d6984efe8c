"""The rotary tables against transformers' own, for every scaling."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import LLAMA3, TINY, VARIANTS, YARN, transformers_config
from tolerances import COSINE_ABSOLUTE, INVERSE_FREQUENCY_RELATIVE

from cutaway.config import RopeScaling
from cutaway.forward.rope import attention_factor, inverse_frequencies, rope_tables

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SHAPES = ((64, 1e6, 32768), (64, 1e4, 2048), (128, 5e5, 131072), (16, 1e4, 2048))
SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 3.0),
    "llama3": replace(LLAMA3, original_max_context=8192),
    "llama3-32": RopeScaling("llama3", 32.0, original_max_context=8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": replace(YARN, original_max_context=1024),
    "yarn-whole-numbers-off": replace(YARN, original_max_context=1024, truncate=False),
    "yarn-betas": replace(YARN, original_max_context=4096, beta_fast=16.0, beta_slow=2.0),
    "yarn-attention-factor": replace(YARN, original_max_context=1024, attention_factor=0.75),
    "yarn-mscale": replace(YARN, original_max_context=1024, mscale=0.707, mscale_all_dim=1.0),
    "yarn-step": replace(YARN, original_max_context=1024, beta_fast=8.0, beta_slow=8.0, truncate=False),
    "yarn-far": replace(YARN, original_max_context=10_000_000),
    "yarn-narrow": replace(YARN, original_max_context=2, truncate=True),
}


def rotary(config):
    """transformers' rotary embedding of that config."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(transformers_config(replace(config, architecture="llama", qkv_bias=False)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_factor_are_those_of_transformers(scaling, shape):
    head_dim, theta, max_context = shape
    config = replace(TINY, head_dim=head_dim, rope_theta=theta, max_context=max_context, rope_scaling=SCALINGS[scaling])
    theirs = rotary(config)
    np.testing.assert_allclose(
        inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=INVERSE_FREQUENCY_RELATIVE, atol=0
    )
    assert attention_factor(config.rope_scaling) == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_are_those_of_transformers_where_the_frequency_is_the_same(variant):
    config = VARIANTS[variant]
    theirs = rotary(config)
    same = inverse_frequencies(config) == theirs.inv_freq.numpy()
    assert same.mean() > 0.5
    cos, sin = theirs(torch.zeros(1), torch.arange(config.max_context)[None])
    half = config.head_dim // 2
    ours = rope_tables(config, config.max_context)
    for table, other in zip(ours, (cos, sin), strict=True):
        np.testing.assert_allclose(table[:, same], other[0, :, :half].numpy()[:, same], rtol=0, atol=COSINE_ABSOLUTE)
