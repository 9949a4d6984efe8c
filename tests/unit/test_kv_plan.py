"""What the KV cache takes: the field's own numbers, and predicted = allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from glass_llm import HEAD_32

from cutaway.config import ModelConfig
from cutaway.engine.kv_cache import KVCache
from cutaway.errors import RequestError
from cutaway.experiments.kv import formula, plan, scratch_estimate
from cutaway.experiments.machine import Memory, machine, memory
from cutaway.render import render
from cutaway.render.views import kv as view

QWEN = ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, qkv_bias=True, tied_head=True)
SMOLLM = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_head=True)
MIB = 1 << 20
ENOUGH = Memory(8 << 30, 4 << 30, "test")


@pytest.mark.parametrize(
    ("k_type", "v_type", "per_token", "mib"),
    [("f32", "f32", 24576, 768), ("f16", "f16", 12288, 384), ("q8_0", "q8_0", 6528, 204), ("f16", "q8_0", 9408, 294)],
)
def test_the_numbers_of_qwen_at_32768_tokens(k_type: str, v_type: str, per_token: int, mib: int) -> None:
    result = plan(QWEN, 0, 32768, k_type, v_type, available=ENOUGH)
    assert result.bytes_per_token == per_token
    assert result.kv_bytes == mib * MIB


def test_the_formula_has_the_model_s_numbers() -> None:
    assert formula(QWEN, "f16", "f16") == "2 x 24 x 2 x 64 x 2 B = 12,288 B"
    assert formula(SMOLLM, "f16", "f16") == "2 x 30 x 3 x 64 x 2 B = 23,040 B"
    assert formula(QWEN, "q8_0", "q8_0") == "2 x 24 x 2 x 64 x (1 + 2/32) B = 6,528 B"
    assert formula(QWEN, "f16", "q8_0") == "24 x 2 x 64 x (2 B + (1 + 2/32) B) = 9,408 B"


@pytest.mark.parametrize("k_type", ["f32", "f16", "q8_0"])
def test_every_formula_is_true(k_type: str) -> None:
    left, _, right = formula(QWEN, k_type, k_type).partition(" = ")
    assert eval(left.replace("x", "*").replace(" B", "")) == int(right.replace(",", "").removesuffix(" B"))


def test_other_numbers_of_heads() -> None:
    named = {variant.name: variant for variant in plan(QWEN, 0, 32768, available=ENOUGH).variants}
    assert (named["MHA f16"].nbytes, named["MHA f16"].ratio) == (2688 * MIB, 7.0)
    assert (named["MQA f16"].nbytes, named["MQA f16"].ratio) == (192 * MIB, 0.5)
    assert named["f32"].ratio == 2.0


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("f16", "q8_0"), ("q8_0", "f32")])
@pytest.mark.parametrize("context", [1, 31, 32, 33, 1000])
def test_predicted_is_allocated_to_the_byte(types: tuple[str, str], context: int) -> None:
    result = plan(HEAD_32, 0, context, *types, available=ENOUGH)
    kept = KVCache(HEAD_32, result.allocated_tokens // result.block_size, *types, block_size=result.block_size)
    assert result.kv_bytes == kept.nbytes
    assert context <= result.allocated_tokens < context + result.block_size


def test_total_and_what_fits() -> None:
    result = plan(QWEN, 400 * MIB, 32768, scratch_bytes=24 * MIB, available=Memory(None, 1000 * MIB + 13_000, "test"))
    assert result.total_bytes == (400 + 384 + 24) * MIB
    assert result.fits is True
    assert result.fits_tokens == (1000 - 424) * MIB // 12288 // 32 * 32
    most = plan(QWEN, 400 * MIB, result.fits_tokens, scratch_bytes=24 * MIB, available=result.memory)
    more = plan(QWEN, 400 * MIB, result.fits_tokens + 1, scratch_bytes=24 * MIB, available=result.memory)
    assert (most.fits, more.fits) == (True, False)


def test_memory_that_is_unknown_or_too_small() -> None:
    unknown = plan(QWEN, 400 * MIB, 4096, available=Memory(None, None, "unknown"))
    assert (unknown.fits, unknown.fits_tokens) == (None, None)
    small = plan(QWEN, 400 * MIB, 4096, available=Memory(None, MIB, "test"))
    assert (small.fits, small.fits_tokens) == (False, 0)


def test_the_default_context_is_the_trained_one_and_a_bad_one_is_refused() -> None:
    assert plan(QWEN, 0, available=ENOUGH).context == 32768
    with pytest.raises(RequestError, match="context"):
        plan(QWEN, 0, 0, available=ENOUGH)
    with pytest.raises(RequestError, match="q4_0"):
        plan(QWEN, 0, 10, "q4_0", available=ENOUGH)


def test_a_head_that_q8_0_cannot_group_is_left_out() -> None:
    names = [variant.name for variant in plan(replace(QWEN, head_dim=16), 0, 10, available=ENOUGH).variants]
    assert names == ["f32", "f16", "MHA f16", "MQA f16"]


def test_scratch_is_counted_where_it_is_not_known() -> None:
    result = plan(QWEN, 0, 10, available=ENOUGH)
    assert result.scratch_estimated
    assert result.scratch_bytes == scratch_estimate(QWEN)
    assert 20 * MIB < result.scratch_bytes < 40 * MIB
    assert not plan(QWEN, 0, 10, scratch_bytes=5, available=ENOUGH).scratch_estimated


def test_the_view_says_the_formula_and_does_not_mix_units() -> None:
    text = " ".join(render(view.plan(plan(QWEN, 400 * MIB, available=ENOUGH)), "terminal").split())
    assert "2 x 24 x 2 x 64 x 2 B = 12,288 B = 12 KiB" in text
    assert "384 MiB" in text
    assert "7 times as large: 2,688 MiB = 2.625 GiB = 2.82 GB" in text
    assert "(Dividing the MiB by 1000 gives 2.7, which is neither GiB nor GB.)" in text
    assert "可用内存" in render(view.plan(plan(QWEN, 400 * MIB, available=ENOUGH), "zh"), "terminal")
    warned = render(view.plan(plan(QWEN, 1, available=Memory(None, 10, "test"))), "terminal")
    assert "does not fit" in warned


# -- memory of the machine --------------------------------------------------------------------------------------------


def _proc(folder: Path, available_kib: int = 2048) -> Path:
    (folder / "meminfo").write_text(f"MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\nHuge: 0\n")
    return folder


def test_memory_comes_from_the_kernel(tmp_path: Path) -> None:
    assert memory(_proc(tmp_path), tmp_path / "none") == Memory(4 * MIB, 2 * MIB, "/proc/meminfo")
    assert memory(tmp_path / "none", tmp_path / "none") == Memory(None, None, "unknown")


def test_a_control_group_that_allows_less_is_believed(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{MIB}\n")
    (tmp_path / "memory.current").write_text(f"{MIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {MIB // 4}\n")
    assert memory(_proc(tmp_path), tmp_path) == Memory(4 * MIB, MIB * 3 // 4, "control group")
    assert memory(_proc(tmp_path, 10), tmp_path).source == "/proc/meminfo"
    (tmp_path / "memory.max").write_text("max\n")
    assert memory(_proc(tmp_path), tmp_path).source == "/proc/meminfo"


def test_the_machine_is_known() -> None:
    found = machine()
    assert found.processor
    assert found.threads >= 1
    assert found.versions["numpy"]
