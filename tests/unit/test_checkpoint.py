"""files/checkpoint.py: the same model from a GGUF file and from a Hugging Face folder, and what is refused."""

import errno
import json
import math
import mmap
import os
import struct
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from gguf_file import config_metadata, gguf_bytes, model_bytes
from tiny import LLAMA, QWEN3, TINY, VARIANTS, random_weights

from cutaway.config import RopeScaling
from cutaway.errors import FormatError, LoadError, NotFoundError, UnsupportedError
from cutaway.files.checkpoint import load
from cutaway.files.weights import weight_names
from cutaway.forward.decoder import decoder
from cutaway.quant import Weight, f32_to_bf16, quantize

SMALL = replace(TINY, num_layers=1)


def settings(config=SMALL, **changes):
    """config.json of a config without rope scaling; a change to None takes a key out."""
    values = {
        "model_type": config.architecture,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


def write_safetensors(path, weights):
    table, data = {}, b""
    for name, weight in weights.items():
        end = len(data) + weight.nbytes
        table[name] = {"dtype": weight.format, "shape": list(weight.shape), "data_offsets": [len(data), end]}
        data += weight.data.tobytes()
    header = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def hf_weights(config, format="F32", seed=0):
    weights = random_weights(decoder(config), format, seed)
    return {w.hf: weights[w.name] for w in weight_names(config)}


def write_folder(folder, values, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def write_gguf(path, config=SMALL, weights=None, format="F32", **metadata):
    weights = random_weights(decoder(config), format) if weights is None else weights
    path.write_bytes(model_bytes(config, weights, **metadata))
    return path


def same_weights(a, b):
    return a.keys() == b.keys() and all(
        a[n].shape == b[n].shape and np.array_equal(a[n].dequantize(), b[n].dequantize()) for n in a
    )


# -- one model, two kinds of files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, QWEN3, LLAMA, VARIANTS["qwen3-untied-explicit-head-dim"]])
def test_a_folder_and_a_gguf_file_give_the_same_model(tmp_path, config):
    weights = random_weights(decoder(config))
    folder = load(write_folder(tmp_path / "hf", settings(config), hf_weights(config)))
    gguf = load(write_gguf(tmp_path / "x.gguf", config, weights))
    as_f32 = {
        "rms_norm_eps": float(np.float32(config.rms_norm_eps)),
        "rope_theta": float(np.float32(config.rope_theta)),
    }
    assert folder.config == config
    assert gguf.config == replace(config, **as_f32)
    assert same_weights(folder.weights, weights)
    assert same_weights(gguf.weights, weights)
    assert {n: w.shape for n, w in gguf.weights.items()} == decoder(config).weight_shapes
    assert folder.params == gguf.params == sum(math.prod(s) for s in decoder(config).weight_shapes.values())
    assert folder.nbytes == gguf.nbytes == 4 * folder.params


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_weight_names_are_those_of_the_program(name):
    names = list(weight_names(VARIANTS[name]))
    assert {w.name: w.shape for w in names} == decoder(VARIANTS[name]).weight_shapes
    assert len({w.gguf for w in names}) == len({w.hf for w in names}) == len(names)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_what_transformers_saves_is_the_config_it_was_made_from(tiny_folder, name):
    checkpoint = load(tiny_folder(name))
    assert checkpoint.config == VARIANTS[name]
    assert same_weights(checkpoint.weights, random_weights(decoder(VARIANTS[name])))


@pytest.mark.parametrize("format", ["F16", "BF16"])
def test_half_precision_stays_as_it_is(tmp_path, format):
    checkpoint = load(write_folder(tmp_path / "m", settings(), hf_weights(SMALL, format)))
    assert checkpoint.weights["embed.weight"].format == format
    assert checkpoint.weights["embed.weight"].data.shape == (97, 128)
    assert not checkpoint.weights["embed.weight"].data.flags.owndata


def test_a_bf16_weight_past_the_largest_float16_stays_finite(tmp_path):
    weights = hf_weights(SMALL, "BF16")
    name = "model.layers.0.mlp.up_proj.weight"
    data = weights[name].data.copy()
    data.view(np.uint16)[0, 0] = f32_to_bf16(np.float32([70144.0]))[0]
    weights[name] = replace(weights[name], data=data)
    loaded = load(write_folder(tmp_path / "m", settings(torch_dtype="float16"), weights))
    assert loaded.weights["layers.0.mlp.up.weight"].dequantize()[0, 0] == 70144.0


def test_norms_may_be_any_float_format(tmp_path):
    weights = hf_weights(SMALL)
    norm = Weight("", "F16", (64,), quantize("F16", np.full((1, 64), 1.5)))
    weights["model.norm.weight"] = norm
    assert load(write_folder(tmp_path / "m", settings(), weights)).weights["final_norm.weight"].format == "F16"


def test_mixed_formats_in_a_gguf_file(tmp_path):
    weights = random_weights(decoder(TINY), "mixed")
    loaded = load(write_gguf(tmp_path / "x.gguf", TINY, weights))
    assert {n: w.format for n, w in loaded.weights.items()} == {n: w.format for n, w in weights.items()}
    assert same_weights(loaded.weights, weights)


# -- llama's rows ------------------------------------------------------------------------------------------------------


def test_llama_rows_are_put_back_for_each_key_value_head(tmp_path):
    rows = np.repeat(np.arange(8, dtype=np.float32)[:, None], 32, axis=1)
    for architecture, expected in (("llama", [0, 2, 1, 3, 4, 6, 5, 7]), ("qwen2", [0, 1, 2, 3, 4, 5, 6, 7])):
        config = replace(SMALL, architecture=architecture, hidden=32, num_heads=8, num_kv_heads=2, head_dim=4,
                         qkv_bias=True)  # fmt: skip
        weights = random_weights(decoder(config))
        stored = {w.gguf: weights[w.name] for w in weight_names(config)}
        stored["blk.0.attn_k.weight"] = Weight("", "F32", (8, 32), rows.view(np.uint8))
        stored["blk.0.attn_k.bias"] = Weight("", "F32", (8,), rows[:, :1].copy().view(np.uint8))
        (tmp_path / "x.gguf").write_bytes(gguf_bytes(config_metadata(config), stored))
        loaded = load(tmp_path / "x.gguf").weights
        assert loaded["layers.0.attn.k.weight"].dequantize()[:, 0].tolist() == expected
        assert loaded["layers.0.attn.k.bias"].dequantize().tolist() == expected
        assert np.array_equal(
            loaded["layers.0.attn.v.weight"].dequantize(), weights["layers.0.attn.v.weight"].dequantize()
        )


# -- tied and untied heads ---------------------------------------------------------------------------------------------


def head(seed):
    return Weight("", "F32", (97, 64), np.random.default_rng(seed).normal(0, 1, (97, 64)).astype("f4").view(np.uint8))


def test_heads_of_a_folder(tmp_path):
    weights = hf_weights(SMALL)
    embed = weights["model.embed_tokens.weight"]

    def read(name, tied, more):
        return load(write_folder(tmp_path / name, settings(tie_word_embeddings=tied), {**weights, **more}))

    tied = read("1", True, {})
    assert tied.config.tied_head
    assert "head.weight" not in tied.weights
    untied = read("2", False, {"lm_head.weight": head(5)})
    assert not untied.config.tied_head
    assert np.array_equal(untied.weights["head.weight"].data, head(5).data)
    same = read("3", True, {"lm_head.weight": embed})
    assert same.config.tied_head
    assert same_weights(same.weights, tied.weights)
    with pytest.raises(FormatError, match=r"lm_head\.weight is missing"):
        read("4", False, {})
    other = read("5", True, {"lm_head.weight": head(6)})  # the file holds another head: it is used
    assert not other.config.tied_head
    assert np.array_equal(other.weights["head.weight"].data, head(6).data)


def test_heads_of_a_gguf_file(tmp_path):
    assert load(write_gguf(tmp_path / "tied.gguf")).config.tied_head
    untied = replace(SMALL, tied_head=False)
    weights = {**random_weights(decoder(untied)), "head.weight": head(5)}
    loaded = load(write_gguf(tmp_path / "untied.gguf", untied, weights))
    assert not loaded.config.tied_head
    assert np.array_equal(loaded.weights["head.weight"].data, head(5).data)


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_head_dim_is_what_the_settings_say(tmp_path):
    explicit = replace(SMALL, head_dim=32)
    loaded = load(write_folder(tmp_path / "a", settings(explicit), hf_weights(explicit)))
    shapes = {n[14:]: w.shape for n, w in loaded.weights.items() if ".attn." in n and n.endswith("weight")}
    assert shapes == {"q.weight": (128, 64), "k.weight": (64, 64), "v.weight": (64, 64), "o.weight": (64, 128)}
    for values in (settings(head_dim=None), {**settings(), "head_dim": None}):
        assert load(write_folder(tmp_path / "b", values, hf_weights(SMALL))).config.head_dim == 16
    with pytest.raises(FormatError, match=r"q_proj\.weight: found \[64, 64\], expected \[128, 64\]"):
        load(write_folder(tmp_path / "c", settings(explicit), hf_weights(SMALL)))


def test_a_weight_of_another_shape_names_the_tensor(tmp_path):
    weights = random_weights(decoder(SMALL))
    up = weights["layers.0.mlp.up.weight"]
    weights["layers.0.mlp.up.weight"] = replace(up, shape=(64, 96), data=up.data.reshape(64, -1))
    with pytest.raises(FormatError, match=r"tensor blk\.0\.ffn_up\.weight: found \[64, 96\], expected \[96, 64\]"):
        load(write_gguf(tmp_path / "x.gguf", SMALL, weights))


def test_a_missing_and_an_extra_tensor(tmp_path):
    weights = hf_weights(SMALL)
    gone = {n: w for n, w in weights.items() if n != "model.layers.0.self_attn.k_proj.bias"}
    with pytest.raises(FormatError, match=r"k_proj\.bias is missing"):
        load(write_folder(tmp_path / "a", settings(), gone))
    more = {**weights, "model.layers.0.self_attn.q_proj.weight_scale": head(0)}
    with pytest.raises(UnsupportedError, match="weight_scale belongs to something that is not implemented"):
        load(write_folder(tmp_path / "b", settings(), more))
    harmless = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": head(0)}
    load(write_folder(tmp_path / "c", settings(), harmless))


def test_formats_that_are_not_implemented(tmp_path):
    weights = hf_weights(SMALL)
    weights["model.norm.weight"] = Weight("", "F64", (64,), np.ones((1, 64)).view(np.uint8))
    with pytest.raises(UnsupportedError, match=r"tensor model\.norm\.weight: found F64"):
        load(write_folder(tmp_path / "a", settings(), weights))
    weights = random_weights(decoder(SMALL))
    weights["final_norm.weight"] = Weight("", "Q8_0", (64,), quantize("Q8_0", np.ones((1, 64))))
    with pytest.raises(UnsupportedError, match=r"tensor output_norm\.weight: found Q8_0"):
        load(write_gguf(tmp_path / "x.gguf", SMALL, weights))


# -- rope scaling ------------------------------------------------------------------------------------------------------

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
    ],
)
def test_yarn_in_every_spelling(tmp_path, rope):
    values = settings(max_position_embeddings=32768, **rope)
    config = load(write_folder(tmp_path / "m", values, hf_weights(SMALL))).config
    assert config.rope_scaling == RopeScaling("yarn", 4.0, 32768)
    assert (config.max_context, config.rope_theta) == (131072, 10000.0)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, RopeScaling()),
        ({"rope_scaling": None}, RopeScaling()),
        ({"rope_scaling": {"rope_type": "default"}}, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.5, "mscale_all_dim": 0, "beta_fast": 16}},
            RopeScaling("yarn", 2.0, 2048, mscale=0.5, beta_fast=16.0),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            RopeScaling("llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_rope_scaling(tmp_path, rope, expected):
    assert load(write_folder(tmp_path / "m", settings(**rope), hf_weights(SMALL))).config.rope_scaling == expected


def test_theta_of_the_new_spelling(tmp_path):
    values = settings(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert load(write_folder(tmp_path / "m", values, hf_weights(SMALL))).config.rope_theta == 1e6


def test_rope_scaling_of_a_gguf_file(tmp_path):
    def read(**keys):
        metadata = {f"qwen2__rope__{key}": value for key, value in keys.items()}
        return load(write_gguf(tmp_path / "x.gguf", **metadata)).config

    assert read().rope_scaling == RopeScaling()
    assert read(scaling__type="none").rope_scaling == RopeScaling()
    assert read(scaling__type="linear", scaling__factor=2.0).rope_scaling == RopeScaling("linear", 2.0)
    yarn = read(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=1024)
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 1024)
    assert yarn.max_context == 4096
    attention = read(scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=0.5).rope_scaling
    assert attention.attention_factor == pytest.approx(0.5 * 1.138629, rel=1e-6)
    with pytest.raises(UnsupportedError, match="longrope"):
        read(scaling__type="longrope", scaling__factor=4.0)


def test_frequency_factors_of_a_gguf_file(tmp_path):
    weights = random_weights(decoder(SMALL))
    stored = {w.gguf: weights[w.name] for w in weight_names(SMALL)}
    factors = np.float32([1, 1, 1, 2.5, 8, 8, 8, 8])

    def read(values):
        stored["rope_freqs.weight"] = Weight("", "F32", values.shape, values.view(np.uint8))
        (tmp_path / "x.gguf").write_bytes(gguf_bytes(config_metadata(SMALL), stored))
        return load(tmp_path / "x.gguf").config.rope_scaling

    assert read(factors) == RopeScaling("llama3", frequency_factors=tuple(factors.tolist()))
    for bad in (factors[:5].copy(), factors * 0, factors * np.float32(np.nan)):
        with pytest.raises(FormatError, match=r"rope_freqs\.weight"):
            read(bad)


# -- refused by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "qwen2_moe"}, "qwen2_moe"),
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "hidden_act is not implemented: found 'gelu'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"found AWQ \(4 bits\)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, r"found GPTQ \(8 bits\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "found FP8"),
        ({"quantization_config": {"load_in_4bit": True}}, "found bitsandbytes"),
        ({"quantization_config": {"quant_method": "hqq"}}, "found hqq"),
        ({"quantization_config": {"quant_method": 5}}, "an unnamed method"),
        ({"quantization_config": "fp8"}, "an object"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window in use is not implemented: found 512"),
        ({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: found 'sliding_attention'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: found 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is not implemented: found 0.25"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "without rope_type: found 'full_attention'",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "without rope_type"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "differ: found 'yarn' and 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"num_experts": 8}, "num_experts"),
    ],
)
def test_settings_that_are_refused(tmp_path, changes, match):
    with pytest.raises(LoadError, match=match):
        load(write_folder(tmp_path / "m", settings(**changes), hf_weights(SMALL)))


def test_settings_that_change_nothing_are_accepted(tmp_path):
    changes = {
        "use_sliding_window": False,
        "sliding_window": 512,
        "max_window_layers": 1,
        "layer_types": ["full_attention"],
        "hidden_act": "silu",
        "partial_rotary_factor": 1.0,
        "dtype": "bfloat16",
    }
    load(write_folder(tmp_path / "m", settings(**changes), hf_weights(SMALL)))
    unused = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}
    load(write_folder(tmp_path / "n", settings(**unused), hf_weights(SMALL)))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("general.architecture", "gemma3", "gemma3"),
        ("qwen2.expert_count", 4, "expert_count"),
        ("qwen2.attention.sliding_window", 512, "sliding_window"),
        ("qwen2.rope.dimension_count", 8, "rope.dimension_count"),
        ("qwen2.attention.value_length", 8, "value_length"),
        ("qwen2.rope.dimension_sections", [2, 2, 2], "dimension_sections"),
        ("qwen2.attention.head_count_kv", [2, 4], "head_count_kv"),
        ("qwen2.logit_scale", 0.5, "logit_scale"),
        ("tokenizer.ggml.model", "llama", "'llama'"),
        ("tokenizer.ggml.tokens", 5, "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.tokens", ["a"] * 98, "more tokens than rows"),
        ("tokenizer.ggml.token_type", [1, 1], "token_type"),
        ("tokenizer.ggml.eos_token_id", "</s>", "eos_token_id"),
    ],
)
def test_gguf_keys_that_are_refused(tmp_path, key, value, match):
    with pytest.raises(LoadError, match=match):
        load(write_gguf(tmp_path / "x.gguf", **{key.replace(".", "__"): value}))


# -- what comes with the weights ---------------------------------------------------------------------------------------


def test_vocabulary_template_and_settings_of_a_gguf_file(tmp_path):
    checkpoint = load(
        write_gguf(
            tmp_path / "x.gguf",
            general__name="Tiny",
            general__sampling__temp=0.5,
            general__sampling__top_k=20,
            tokenizer__chat_template="{{ x }}",
            tokenizer__ggml__model="gpt2",
            tokenizer__ggml__pre="qwen2",
            tokenizer__ggml__tokens=["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|im_start|>"],
            tokenizer__ggml__token_type=[1, 3, 3, 1, 3],
            tokenizer__ggml__merges=["a a"],
            tokenizer__ggml__eos_token_id=1,
            tokenizer__ggml__eom_token_id=40,
            tokenizer__ggml__bos_token_id=2,
            tokenizer__ggml__padding_token_id=4,
        )
    )
    v = checkpoint.vocabulary
    assert (v.kind, v.pre, list(v.merges), v.eos_id) == ("gguf", "qwen2", ["a a"], 1)
    assert list(v.token_types) == [1, 3, 3, 1, 3]
    # eos and eom as stated, <|endoftext|> by its name; <|eot_id|> is no control token here, <|im_start|> ends nothing
    assert checkpoint.eos_ids == {1, 40, 2}
    assert (checkpoint.bos_id, checkpoint.add_bos) == (2, False)
    assert checkpoint.generation == {"temp": 0.5, "top_k": 20}
    assert (checkpoint.name, checkpoint.chat_template) == ("Tiny", "{{ x }}")


def test_a_gguf_file_without_a_vocabulary(tmp_path):
    checkpoint = load(write_gguf(tmp_path / "x.gguf"))
    assert (checkpoint.name, checkpoint.chat_template, checkpoint.eos_ids) == ("x", None, frozenset())
    assert (len(checkpoint.vocabulary.tokens), checkpoint.bos_id) == (0, None)


def test_bos_is_added_where_the_file_or_the_split_says_so(tmp_path):
    def add_bos(**keys):
        return load(write_gguf(tmp_path / "x.gguf", **{f"tokenizer__ggml__{k}": v for k, v in keys.items()})).add_bos

    assert add_bos(pre="llama-bpe")
    assert not add_bos(pre="llama-bpe", add_bos_token=False)
    assert add_bos(pre="qwen2", add_bos_token=True)


TOKENIZER_JSON = {
    "version": "1.0",
    "added_tokens": [{"id": 151643, "content": "<|endoftext|>"}, {"id": 151645, "content": "<|im_end|>"}],
    "model": {},
}


@pytest.mark.parametrize("generation_eos", [[151645, 151643], 151643, None])
@pytest.mark.parametrize("eos_token", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_end_ids_of_a_folder_are_united(tmp_path, generation_eos, eos_token):
    folder = write_folder(tmp_path / "m", settings(eos_token_id=151643), hf_weights(SMALL))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER_JSON))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos, "top_k": 20}))
    checkpoint = load(folder)
    assert checkpoint.eos_ids == {151645, 151643}
    assert checkpoint.vocabulary.eos_id == 151645
    assert checkpoint.vocabulary.tokenizer_json == folder / "tokenizer.json"
    assert checkpoint.generation.get("top_k") == (None if generation_eos is None else 20)


def test_tokens_of_tokenizer_config_are_found_without_tokenizer_json(tmp_path):
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    decoder = {"7": {"content": "<s>"}, "8": {"content": "</s>"}, "²": {"content": "x"}, "9": 1}
    values = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    checkpoint = load(folder)
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.add_bos) == (7, {8}, True)


def test_chat_template_of_a_folder(tmp_path):
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    assert load(folder).chat_template is None

    def with_config(template):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return load(folder).chat_template

    assert with_config("one") == "one"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert with_config(several) == "d"
    with pytest.raises(FormatError, match="chat_template"):
        with_config(5)
    (folder / "chat_template.jinja").write_text("from its own file", "utf-8")
    assert with_config("one") == "from its own file"


# -- folders -----------------------------------------------------------------------------------------------------------


def test_shards(tmp_path):
    folder = write_folder(tmp_path / "m", settings(), {})
    (folder / "model.safetensors").unlink()
    weights = hf_weights(SMALL)
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        write_safetensors(folder / file, {n: weights[n] for n in part})
    weight_map = {n: file for file, part in halves.items() for n in part}

    def read(weight_map):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return load(folder)

    checkpoint = read(weight_map)
    assert same_weights(checkpoint.weights, random_weights(decoder(SMALL)))
    assert [f.name for f in checkpoint.files] == sorted(halves)
    for bad in ("../model.safetensors", "/etc/passwd", "x/y.safetensors", 5, "model.bin"):
        with pytest.raises(FormatError, match="safetensors file beside it"):
            read({**weight_map, names[0]: bad})
    with pytest.raises(FormatError, match="nothing is missing, and the index says it is here"):
        read({**weight_map, "nothing": "model-00001-of-00002.safetensors"})
    with pytest.raises(FormatError, match="weight_map"):
        read([])
    with pytest.raises(NotFoundError, match=r"model-9\.safetensors is missing"):
        read({**weight_map, names[0]: "model-9.safetensors"})


@pytest.mark.parametrize(("file", "named"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")])
def test_older_quantised_folders_are_named(tmp_path, file, named):
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    (folder / file).write_text(json.dumps({"w_bit" if named == "AWQ" else "bits": 4}))
    with pytest.raises(UnsupportedError, match=rf"{file}: quantised weights.* found {named} \(4 bits\)"):
        load(folder)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path):
    """Each alone opens; together, nobody but their author knows which is the model."""
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shard = folder / "model-00001-of-00001.safetensors"
    other = random_weights(decoder(SMALL), seed=1)
    write_safetensors(shard, hf_weights(SMALL, seed=1))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(hf_weights(SMALL), shard.name)}))
    for path in (folder, single, shard):
        with pytest.raises(
            FormatError, match=r"holds model\.safetensors and model\.safetensors\.index\.json, which names"
        ):
            load(path)
    kept = single.rename(tmp_path / "kept")
    assert same_weights(load(folder).weights, other)
    kept.rename(single)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(hf_weights(SMALL), single.name)}))
    assert same_weights(load(folder).weights, random_weights(decoder(SMALL)))


def test_a_file_of_weights_that_its_folder_does_not_use_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    write_safetensors(folder / "other.safetensors", hf_weights(SMALL))
    with pytest.raises(UnsupportedError, match=r"other\.safetensors is not among the weights of its folder"):
        load(folder / "other.safetensors")
    assert load(folder / "model.safetensors").path == folder
    named = (tmp_path / "m").rename(tmp_path / "m.safetensors")
    assert load(named).path == named


def test_what_the_system_refuses_is_one_line(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    index = {"weight_map": dict.fromkeys(hf_weights(SMALL), "x" * 300 + ".safetensors")}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="m could not be read: found File name too long"):
        load(folder)
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(model_bytes(SMALL, random_weights(decoder(SMALL))))
    for error, found in (
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (MemoryError(), "not enough memory"),
    ):
        monkeypatch.setattr(mmap, "mmap", Mock(side_effect=error))
        with pytest.raises(LoadError, match=f"could not be read: found {found}"):
            load(gguf)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_not_opened(tmp_path, name):
    """A FIFO would wait for its writer for ever, /dev/zero never end."""
    folder = write_folder(tmp_path / "m", settings(), hf_weights(SMALL))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name in ("config.json", "model.safetensors"):
        with pytest.raises(NotFoundError, match=r"not a Hugging Face folder|holds no weights"):
            load(folder)
    else:
        assert load(folder).chat_template is None
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", "/dev/zero", "/dev/null", "/dev/stdin"):
        with pytest.raises(NotFoundError, match="is not a file"):
            load(path)


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(NotFoundError, match="does not exist"):
        load(tmp_path / "nothing")
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"config\.json in it.*some\.gguf"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings()))
    with pytest.raises(NotFoundError, match=r"holds no weights.*name one of its GGUF files: some\.gguf"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"pickled weights \(pytorch_model\.bin\), which are never opened"):
        load(tmp_path)


def test_names(tmp_path):
    snapshot = tmp_path / "models--Org--Name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert load(write_folder(snapshot, settings(), hf_weights(SMALL))).name == "Org/Name"
    folder = write_folder(tmp_path / "mine", settings(), hf_weights(SMALL))
    assert load(folder).name == "mine"
    assert load(folder / "model.safetensors").path == folder
