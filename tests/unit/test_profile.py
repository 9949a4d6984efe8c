"""The profile: medians, shares, bytes and the roof on an interpreter with known times; the native one's phases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from glass_llm import GlassLLM

from cutaway.cli import main
from cutaway.errors import ContextLengthError, RequestError, UnsupportedError
from cutaway.experiments.profile import kind_of, profile
from cutaway.forward.native import NativeProgram
from cutaway.forward.program import TopLogits
from cutaway.render import render
from cutaway.render.views.profile import profile as view

ROOF = 1e9


class Clocked:
    """Every operation of the Program takes 10 us, the head 1 ms a run: 1, 2, 3 ... then again from 1."""

    threads, isa, activations, head_rows_finished = 2, "none", "int8", 16

    def __init__(self, llm: Any) -> None:
        self.names, self.vocab, self.runs, self.top_k = llm.program.names, llm.config.vocab, 0, 0
        self.packed_sizes = {"embed.weight": llm.config.vocab * 272}
        self.steps: list[tuple[int, int]] = []

    def run(self, batch: Any, kv_cache: Any, taps: Any = None, *, profile: bool = False) -> Any:
        self.runs, self.top_k = self.runs + 1, batch.head_top_k or 0
        self.steps.append((int(batch.positions[0]), len(batch.token_ids)))
        if self.top_k:
            return TopLogits(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))
        return np.zeros((len(batch.output_rows), self.vocab), np.float32)

    def times(self) -> list[tuple[tuple[str, ...], float]]:
        head = 1e6 * (1 + (self.runs - 1) % 3)
        return [*(((name,), 1e6 * 0.01) for name in self.names[:-1]), ((self.names[-1],), head), (("top_logits",), 5e5)]


def made(**more: Any) -> tuple[Any, Clocked]:
    llm: Any = GlassLLM()
    llm.interpreter = Clocked(llm)
    return profile(llm, bandwidth_of=lambda threads: ROOF * threads, **more), llm.interpreter


def test_steps_times_and_shares() -> None:
    result, interpreter = made(prompt=12, depth=20, repeats=3)
    assert interpreter.steps == [(0, 20)] + [(20, 12)] * 4 + [(32, 1)] * 13  # one more of each warms up
    assert [(p.phase, p.num_tokens, p.depth, p.repeats) for p in result.phases] == [
        ("prefill", 12, 20, 3),
        ("decode", 1, 32, 12),
    ]
    assert (result.bandwidth, result.threads) == (2 * ROOF, 2)
    for phase in result.phases:
        assert [o.ops[0] for o in phase.operations] == [*interpreter.names, "top_logits"]
        head = phase.operations[-2]
        assert head.ns == 2e6  # the median of 1, 2 and 3 ms
        assert phase.total.ns == pytest.approx(sum(o.ns for o in phase.operations))
        assert sum(o.share for o in phase.operations) == pytest.approx(1)
        assert sum(k.share for k in phase.kinds) == pytest.approx(1)
        assert sum(k.count for k in phase.kinds) == len(phase.operations)
        assert sum(k.nbytes for k in phase.kinds) == phase.total.nbytes == sum(o.nbytes for o in phase.operations)
        assert list(phase.kinds) == sorted(phase.kinds, key=lambda kind: -kind.ns)
        assert phase.tokens_s == pytest.approx(1e9 * phase.num_tokens / phase.wall_ns)


def test_bytes_flops_and_roof_of_an_operation() -> None:
    result, _ = made(prompt=12, depth=20, repeats=1)
    decode = result.phases[1]
    q = next(o for o in decode.operations if o.ops == ("layers.1.attn.q",))
    config = GlassLLM().config
    assert q.layer == 1
    assert q.weight_bytes == 4 * (config.q_width * config.hidden + config.q_width)
    assert q.activation_bytes == 4 * (config.hidden + config.q_width)
    assert q.kv_bytes == 0
    assert q.flops == 2 * config.hidden * config.q_width
    assert q.bytes_s == pytest.approx(q.nbytes / 1e-5)
    assert q.bandwidth_share == pytest.approx(q.nbytes / 1e-5 / (2 * ROOF))
    assert q.flops_s == pytest.approx(q.flops / 1e-5)
    attention = next(o for o in decode.operations if o.ops == ("layers.0.attn.mix",))
    assert attention.kv_bytes == 2 * config.kv_width * 4 * (33 + 1)  # 33 keys and values read, one of each written
    both = next(k for k in decode.kinds if k.name == "attn.q")
    assert (both.count, both.nbytes, both.layer) == (2, 2 * q.nbytes, None)
    assert both.bandwidth_share == pytest.approx(q.bandwidth_share)


def test_a_screened_head_counts_what_it_read() -> None:
    screened, _ = made(prompt=4, repeats=1)
    head = next(o for o in screened.phases[1].operations if o.ops == ("logits",))
    vocab = GlassLLM().config.vocab
    assert screened.phases[1].head_rows_finished == 16
    assert head.weight_bytes == vocab * (176 + 16) + 16 * 272
    text = render(view(screened), "md")
    assert "176 of 272 bytes" in text
    assert "finished 16 rows" in text

    whole, _ = made(prompt=4, repeats=1, head_top_k=None)
    decode = whole.phases[1]
    assert next(o for o in decode.operations if o.ops == ("logits",)).weight_bytes == vocab * 272
    assert decode.head_rows_finished == 0
    assert "top_logits" not in [o.name for o in decode.operations]  # that phase was not run: its time is an old one
    assert "176 of 272" not in render(view(whole), "md")


def test_kinds() -> None:
    assert kind_of(["layers.12.attn_norm", "layers.12.attn.q", "layers.12.attn.k"]) == "attn_norm + attn.q/k"
    assert kind_of(["layers.0.mlp.down", "layers.0.residual"]) == "mlp.down + residual"
    assert kind_of(["logits"]) == "logits"


def test_refusals() -> None:
    for wrong in ({"prompt": 0}, {"depth": -1}, {"repeats": 0}):
        with pytest.raises(RequestError):
            made(**wrong)
    with pytest.raises(ContextLengthError, match=r"200 \+ 56 \+ 1"):
        made(prompt=56, depth=200)
    with pytest.raises(UnsupportedError):
        profile(GlassLLM())  # type: ignore[arg-type]


@pytest.fixture
def native() -> Any:
    llm: Any = GlassLLM(tiny.TINY, format="Q8_0")
    llm.k_type = llm.v_type = "f16"
    llm.interpreter = NativeProgram(llm.program, llm.checkpoint.weights, threads=2, max_context=256)
    return llm


def test_the_native_interpreter(native: Any) -> None:
    result = profile(native, prompt=16, depth=8, repeats=2, bandwidth_of=lambda threads: ROOF)
    for phase in result.phases:
        done = [name for o in phase.operations for name in o.ops]
        assert done == [*native.program.names, "top_logits"]  # every operation, once, in order
        assert all(o.ns >= 0 for o in phase.operations)
        assert 0 < phase.total.ns <= 1.5 * phase.wall_ns
        fused = next(o for o in phase.operations if "layers.0.attn.q" in o.ops)
        assert fused.name == "attn_norm + attn.q/k/v"
        packed = native.interpreter.packed_sizes
        assert fused.weight_bytes >= sum(packed[f"layers.0.attn.{part}.weight"] for part in "qkv")
    assert packed["layers.0.attn.q.weight"] == 64 * 64 // 32 * 34


def test_more_threads_share_the_weights_and_give_the_same_bits(native: Any) -> None:
    import steps

    one = native.interpreter
    other = one.with_threads(3)
    assert (other.threads, one.threads) == (3, 2)
    assert other.packed_sizes == one.packed_sizes
    logits = [steps.Stage(each, native.config, "f16").logits(range(20)) for each in (one, other, one)]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_verb(
    native: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("cutaway.cli.loading.locate", lambda name: Path(name or "default"))
    monkeypatch.setattr("cutaway.llm.LLM", lambda path, **loading: native)
    monkeypatch.setattr("cutaway.forward.native.read_bandwidth", lambda threads: ROOF)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["profile", "-p", "8", "-r", "1", *arguments])
        assert end.value.code == 0
        return capsys.readouterr().out

    found = json.loads(run("--json", "-d", "4"))
    assert [p["depth"] for p in found["phases"]] == [4, 12]
    assert {"ns", "nbytes", "bytes_s", "bandwidth_share", "flops_s", "share"} <= set(found["phases"][0]["kinds"][0])
    assert "attn_norm + attn.q/k/v" in run()
    assert "Every operation, in order of execution" in run("--ops", "--md")
    assert "占上限" in run("--lang", "zh", "--md")
    run("-o", str(tmp_path / "p.html"))
    assert "Every operation, in order of execution" in (tmp_path / "p.html").read_text("utf-8")
