"""The Program: names, shapes, work, and the decoder written with it."""

from dataclasses import replace

import pytest
from tiny import LLAMA, QWEN3, TINY, VARIANTS, module_weights

from cutaway.config import ModelConfig
from cutaway.errors import UnsupportedError
from cutaway.forward.decoder import decoder
from cutaway.forward.program import Program, refuse_unknown

QWEN25_05B = ModelConfig(
    architecture="qwen2",
    vocab=151936,
    hidden=896,
    intermediate=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_context=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    qkv_bias=True,
    tied_head=True,
)


def test_one_layer_line_by_line():
    program = decoder(replace(TINY, num_layers=1))
    assert program.names == [
        "embed",
        "layers.0.attn_norm",
        "layers.0.attn.q",
        "layers.0.attn.k",
        "layers.0.attn.v",
        "layers.0.attn.q_rope",
        "layers.0.attn.k_rope",
        "layers.0.attn.mix",
        "layers.0.attn.o",
        "layers.0.attn_residual",
        "layers.0.mlp_norm",
        "layers.0.mlp.gate",
        "layers.0.mlp.up",
        "layers.0.mlp.act",
        "layers.0.mlp.down",
        "layers.0.residual",
        "outputs",
        "final_norm",
        "logits",
    ]
    mix = program["layers.0.attn.mix"]
    assert (mix.kind, mix.layer, mix.weights) == ("attention", 0, ())
    assert mix.inputs == ("layers.0.attn.q_rope", "layers.0.attn.k_rope", "layers.0.attn.v")
    assert program["layers.0.attn_residual"].inputs == ("embed", "layers.0.attn.o")
    assert program["layers.0.residual"].inputs == ("layers.0.attn_residual", "layers.0.mlp.down")


def test_one_token_through_the_real_model_has_the_shapes_of_its_card():
    program = decoder(QWEN25_05B)
    assert program["embed"].shape(1, 1) == (1, 896)
    layers = [op for op in program if op.name.endswith(".residual")]
    assert [op.name for op in layers] == [f"layers.{i}.residual" for i in range(24)]
    assert {op.shape(1, 1) for op in layers} == {(1, 896)}
    assert program["layers.5.attn.k"].shape(1, 1) == (1, 128)
    assert program["layers.5.mlp.gate"].shape(1, 1) == (1, 4864)
    assert program["logits"].shape(1, 1) == (1, 151936)


def test_parameters_of_the_real_model():
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in decoder(QWEN25_05B).weight_shapes.values()]
    assert sum(sizes) == 494_032_768  # as the model's card counts, the tied head once


def test_only_the_rows_that_are_asked_for_reach_the_head():
    program = decoder(TINY)
    assert program["layers.1.residual"].shape(7, 2) == (7, 64)
    for name in ("outputs", "final_norm"):
        assert program[name].shape(7, 2) == (2, 64)
    assert program["logits"].shape(7, 2) == (2, 97)


def test_a_tied_head_reads_the_embedding():
    assert decoder(TINY)["logits"].weights == ("embed.weight",)
    assert "head.weight" not in decoder(TINY).weight_shapes
    untied = decoder(replace(TINY, tied_head=False))
    assert untied["logits"].weights == ("head.weight",)
    assert untied.weight_shapes["head.weight"] == untied.weight_shapes["embed.weight"] == (97, 64)


def test_biases_and_head_norms_are_there_where_the_config_says():
    qwen2, qwen3, llama = decoder(TINY), decoder(QWEN3), decoder(LLAMA)
    assert qwen2["layers.1.attn.k"].weights == ("layers.1.attn.k.weight", "layers.1.attn.k.bias")
    assert qwen2.weight_shapes["layers.1.attn.k.bias"] == (32,)
    assert qwen2["layers.1.attn.o"].weights == ("layers.1.attn.o.weight",)
    assert "layers.0.attn.q_norm" not in qwen2
    assert qwen3["layers.0.attn.q_rope"].inputs == ("layers.0.attn.q_norm",)
    assert qwen3.weight_shapes["layers.0.attn.q_norm.weight"] == (16,)
    assert not [name for name in llama.weight_shapes if name.endswith(".bias")]
    everywhere = decoder(VARIANTS["llama-all-biases"])
    biased = [name for name in everywhere.weight_shapes if name.startswith("layers.0.") and name.endswith(".bias")]
    assert len(biased) == 7


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_are_made_before_they_are_read_and_weights_are_declared(variant):
    program = decoder(VARIANTS[variant])
    made: set[str] = set()
    read: set[str] = set()
    for op in program:
        assert set(op.inputs) <= made
        made.add(op.name)
        read.update(op.weights)
    assert read == set(program.weight_shapes)
    assert program.names[-1] == "logits"
    assert len(made) == len(program)


def test_every_weight_has_a_name_in_the_hugging_face_model():
    names = module_weights(decoder(TINY))
    assert names["model.embed_tokens.weight"] == names["lm_head.weight"] == "embed.weight"
    assert names["model.layers.1.self_attn.v_proj.bias"] == "layers.1.attn.v.bias"
    assert names["model.layers.0.post_attention_layernorm.weight"] == "layers.0.mlp_norm.weight"
    assert names["model.norm.weight"] == "final_norm.weight"
    assert decoder(TINY)["layers.1.residual"].module == "model.layers.1"


def test_flops_count_a_multiply_add_as_two():
    program = decoder(TINY)
    gate, mix = program["layers.0.mlp.gate"], program["layers.0.attn.mix"]
    assert program.flops(gate, range(5), num_outputs=1) == 2 * 5 * 96 * 64
    assert program.flops(program["logits"], range(5), 1) == 2 * 1 * 97 * 64
    # one query head: q.k and p.v are head_dim multiply-adds for each visible key
    assert program.flops(mix, range(5), 1) == 15 * 4 * (2 * 16 + 2 * 16)
    assert program.flops(program["layers.0.attn_residual"], range(5), 1) == 5 * 64
    assert program.flops(program["embed"], range(5), 1) == 0


def test_decoding_the_real_model_costs_two_flops_a_weight():
    program = decoder(QWEN25_05B)
    total = sum(program.flops(op, [0], 1) for op in program if op.kind == "linear")
    matrices = sum(s[0] * s[1] for name, s in program.weight_shapes.items() if len(s) == 2)
    assert total == 2 * matrices  # the embedding counts once: it is the head


def windowed(**told) -> Program:
    """One attention over the embedding, told things."""
    program = Program(replace(TINY, num_layers=1, num_heads=4, num_kv_heads=4))
    with program.layer(0):
        x = program.embed("x", "embed")
        program.attention("mix", x, x, x, **told)
    return program


def test_attributes_are_kept_where_they_differ_from_the_default():
    mix = windowed(window=4, softcap=30.0)["layers.0.mix"]
    assert mix.attributes == (("softcap", 30.0), ("window", 4))
    assert (mix.attribute("window"), mix.attribute("softcap"), mix.attribute("scale")) == (4, 30.0, None)
    plain = windowed()["layers.0.mix"]
    assert plain.attributes == ()
    assert plain.attribute("window") is None
    assert len({mix, plain, windowed(softcap=30.0, window=4)["layers.0.mix"]}) == 2  # hashable, and equal by value
    with pytest.raises(KeyError):
        mix.attribute("windows")
    with pytest.raises(KeyError):
        decoder(TINY)["logits"].attribute("window")


@pytest.mark.parametrize("told", [{"window": 0}, {"window": -3}, {"softcap": 0.0}, {"scale": float("nan")}])
def test_an_attribute_that_makes_no_sense_is_refused_when_it_is_written(told):
    with pytest.raises(ValueError, match=rf"layers\.0\.mix: {next(iter(told))} is .*expected more than 0"):
        windowed(**told)


def test_a_window_bounds_work_and_bytes():
    program, plain = windowed(window=4), windowed()
    mix, all_keys = program["layers.0.mix"], plain["layers.0.mix"]
    assert plain.flops(all_keys, range(6), 1) == (1 + 2 + 3 + 4 + 5 + 6) * 4 * 4 * 16
    assert program.flops(mix, range(6), 1) == (1 + 2 + 3 + 4 + 4 + 4) * 4 * 4 * 16
    assert plain.kv_tokens(all_keys, [20, 21]) == 22 + 2  # all read, two written
    assert program.kv_tokens(mix, [20, 21]) == 5 + 2  # 17 to 21
    assert program.kv_tokens(mix, [1]) == 2 + 1
    assert program.kv_tokens(program["layers.0.x"], [1]) == 0


def test_what_an_interpreter_does_not_know_is_refused_by_name():
    refuse_unknown(windowed(window=4), "it", {"embed": {}, "attention": {"window": ()}})
    refuse_unknown(windowed(window=4), "it", {"embed": {}, "attention": {"window": (4, 8)}})
    with pytest.raises(UnsupportedError, match=r"it knows no such operation: found attention \(layers\.0\.mix\)"):
        refuse_unknown(windowed(), "it", {"embed": {}})
    with pytest.raises(UnsupportedError, match=r"it cannot .*\(layers\.0\.mix\) with this softcap: found 30\.0"):
        refuse_unknown(windowed(softcap=30.0), "it", {"embed": {}, "attention": {"window": ()}})
    with pytest.raises(UnsupportedError, match=r"with this window: found 4, expected 8 or 16"):
        refuse_unknown(windowed(window=4), "it", {"embed": {}, "attention": {"window": (8, 16)}})


def test_two_operations_cannot_have_one_name():
    program = Program(TINY)
    x = program.embed("embed", "model.embed_tokens")
    program.rms_norm("norm", x, "norm")
    with pytest.raises(ValueError, match="two operations named norm"):
        program.rms_norm("norm", x, "norm")


def test_reading_a_program_by_name():
    program = decoder(TINY)
    assert "layers.1.attn.q" in program
    assert "layers.2.attn.q" not in program
    assert program["layers.1.attn.q"].name == "layers.1.attn.q"
    assert len(program) == len(list(program)) == len(program.names)
    with pytest.raises(KeyError):
        program["layers.2.attn.q"]
