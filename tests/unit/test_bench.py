"""The benchmark: what is inside the clock and what is not, llama-bench's names, flags and fields."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import typer
from fake_llm import FakeLLM
from glass_llm import GlassLLM

from cutaway.cli import main
from cutaway.cli.bench import counts
from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.bench import BenchSettings, BenchTest, bench, planned, summary
from cutaway.experiments.lane import HIGH_PLANE, Lane, random_ids, traffic, weight_sizes, with_threads
from cutaway.forward.program import TopLogits
from cutaway.render import render
from cutaway.render.views import bench as view

COMPARED = {  # the fields that llama.cpp's compare-llama-bench.py asks of every entry
    "cpu_info", "gpu_info", "backends", "n_gpu_layers", "tensor_buft_overrides", "model_filename", "model_type",
    "n_batch", "n_ubatch", "embeddings", "cpu_mask", "cpu_strict", "poll", "n_threads", "type_k", "type_v", "use_mmap",
    "no_kv_offload", "split_mode", "main_gpu", "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth",
    "build_commit", "test_time", "avg_ts",
}  # fmt: skip
ROOF = 1e9


class Clocked:
    """An interpreter that computes nothing and takes a known time: its first run long, a prompt by its tokens."""

    def __init__(self, vocab: int, first_s: float = 0.0, token_s: float = 0.004, step_s: float = 0.1) -> None:
        self.vocab, self.first_s, self.token_s, self.step_s = vocab, first_s, token_s, step_s
        self.threads, self.now_ns = 2, 0
        self.steps: list[tuple[int, int, int]] = []  # first position, tokens, output rows
        self.tokens: list[int] = []

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> Any:
        tokens = len(batch.token_ids)
        seconds = self.step_s if tokens == 1 else tokens * self.token_s
        self.now_ns += round(1e9 * (seconds if self.steps else seconds + self.first_s))
        self.steps.append((int(batch.positions[0]), tokens, len(batch.output_rows)))
        self.tokens.append(int(batch.token_ids[0]))
        if batch.head_top_k is not None:
            return TopLogits(np.array([[7]], np.int32), np.ones((1, 1), np.float32))
        return np.zeros((len(batch.output_rows), self.vocab), np.float32)


def clocked(**more: Any) -> tuple[GlassLLM, Clocked]:
    llm = GlassLLM()
    llm.max_context = 2048
    llm.interpreter = Clocked(llm.config.vocab, **more)
    return llm, llm.interpreter


def run(llm: Any, interpreter: Any = None, **settings: Any) -> Any:
    clock = {} if interpreter is None else {"clock_ns": lambda: interpreter.now_ns}
    return bench(llm, BenchSettings(**settings), bandwidth_of=lambda threads: ROOF * threads, **clock)


# -- what is timed ----------------------------------------------------------------------------------------------------


def test_prompt_and_answer_have_rates_of_their_own() -> None:
    """500 tokens in 2.0 s and 9 more 0.1 s apart are 250 and 10 tokens a second, after a first run of 30 s."""
    llm, interpreter = clocked(first_s=30.0)
    prefill, decode = run(llm, interpreter, n_prompt=(500,), n_gen=(9,), repetitions=2).rows
    assert (prefill.test, decode.test) == ("pp500", "tg9")
    assert prefill.samples_ns == (2_000_000_000,) * 2
    assert prefill.avg_ts == pytest.approx(250.0)
    assert decode.avg_ts == pytest.approx(10.0)
    assert (prefill.stddev_ts, decode.stddev_ns) == (0.0, 0)


def test_without_a_warm_up_the_first_run_counts() -> None:
    llm, interpreter = clocked(first_s=30.0)
    row = run(llm, interpreter, n_prompt=(500,), n_gen=(), repetitions=2, warm_up=False).rows[0]
    assert row.samples_ns == (32_000_000_000, 2_000_000_000)
    assert row.avg_ts == pytest.approx((500 / 32 + 250) / 2)


def test_the_tokens_before_a_test_are_outside_the_clock() -> None:
    llm, interpreter = clocked()
    row = run(llm, interpreter, n_prompt=(), n_gen=(4,), n_depth=(1000,), repetitions=3).rows[0]
    assert row.test == "tg4 @ d1000"
    assert row.samples_ns == (400_000_000,) * 3
    assert interpreter.steps[:2] == [(0, 512, 0), (512, 488, 0)]  # without output rows, once for all repetitions
    assert interpreter.steps[3:7] == [(1000 + i, 1, 1) for i in range(4)]
    assert sum(tokens for _, tokens, _ in interpreter.steps) == 1000 + 1 + 3 * 4


def test_a_repeated_prompt_is_computed_again() -> None:
    llm, interpreter = clocked()
    row = run(llm, interpreter, n_prompt=(100,), n_gen=(), ubatch=(64,), repetitions=2).rows[0]
    assert row.samples_ns == (400_000_000,) * 2
    assert interpreter.steps == [(0, 64, 0), (64, 36, 1)] * 3


def test_a_pair_times_both() -> None:
    llm, interpreter = clocked()
    row = run(llm, interpreter, n_prompt=(), n_gen=(), pairs=((100, 6),), repetitions=1).rows[0]
    assert row.test == "pp100+tg6"
    assert row.samples_ns == (1_000_000_000,)
    assert row.avg_ts == pytest.approx(106.0)


def test_top_logits_are_fed_back_and_random_tokens_are_not() -> None:
    llm, interpreter = clocked()
    run(llm, interpreter, n_prompt=(), n_gen=(4,), repetitions=1, warm_up=False, head_top_k=1)
    assert interpreter.tokens[1:] == [7, 7, 7]
    llm, interpreter = clocked()
    run(llm, interpreter, n_prompt=(), n_gen=(4,), repetitions=1, warm_up=False)
    assert interpreter.tokens == random_ids(llm.config.vocab, 4)


def test_summary() -> None:
    found = summary(100, [1_000_000_000, 2_000_000_000])
    assert found["avg_ns"] == 1_500_000_000
    assert found["stddev_ns"] == round(statistics.stdev([1e9, 2e9]))
    assert found["avg_ts"] == 75.0  # of the rates 100 and 50, not 100 / 1.5
    assert found["stddev_ts"] == pytest.approx(statistics.stdev([100, 50]))
    assert summary(100, [1_000_000_000])["stddev_ts"] == 0.0


# -- the tests of a run -----------------------------------------------------------------------------------------------


def test_tests_and_their_names() -> None:
    settings = BenchSettings(n_prompt=(512, 0), n_gen=(128,), pairs=((64, 16),), n_depth=(0, 4096))
    names = [test.name for test in planned(settings)]
    assert names == ["pp512", "tg128", "pp64+tg16", "pp512 @ d4096", "tg128 @ d4096", "pp64+tg16 @ d4096"]
    assert settings.context == 4096 + 512
    assert BenchTest(0, 8, 32).context == 40


def test_every_combination_is_run() -> None:
    rows = run(
        GlassLLM(tiny.TINY), n_prompt=(4,), n_gen=(2,), batch=(8, 2), ubatch=(3,), k_types=("f32", "f16"), repetitions=1
    ).rows
    assert [(r.type_k, r.n_batch, r.test) for r in rows] == [
        (k, b, t) for k in ("f32", "f16") for b in (8, 2) for t in ("pp4", "tg2")
    ]
    assert {r.type_v for r in rows} == {"f16"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_prompt": (0,), "n_gen": ()},
        {"n_prompt": (-1,)},
        {"repetitions": 0},
        {"batch": (0,)},
        {"threads": (0,)},
        {"head_top_k": 0},
        {"head_top_k": 1_000_000},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    llm, interpreter = clocked()
    with pytest.raises(RequestError):
        run(llm, interpreter, **wrong)
    assert interpreter.steps == []


def test_a_test_must_fit_the_context() -> None:
    llm, interpreter = clocked()
    with pytest.raises(ContextLengthError, match="2560 tokens"):
        run(llm, interpreter, n_depth=(2048,))


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_and_bandwidth() -> None:
    llm, interpreter = clocked()
    prefill, decode = run(llm, interpreter, n_prompt=(100,), n_gen=(2,), repetitions=1).rows
    weights = llm.checkpoint.weights
    row = weights["embed.weight"].nbytes // llm.config.vocab
    read = sum(w.nbytes for w in weights.values())  # the table is the head: read whole, and a row looked up
    per_token = 2 * llm.config.num_layers * llm.config.kv_width * 2
    assert decode.bytes_per_token == pytest.approx(read + row + per_token * (2 + 3) / 2)  # read 1 and 2, write 1 each
    assert prefill.bytes_per_token == pytest.approx((read + 100 * row + per_token * 200) / 100)
    assert decode.bandwidth_bytes_s == 2 * ROOF
    assert decode.bandwidth_percent == pytest.approx(100 * decode.bytes_per_token * 10 / (2 * ROOF))


def test_a_step_without_output_rows_reads_no_head() -> None:
    llm, interpreter = clocked()
    whole = run(llm, interpreter, n_prompt=(64,), n_gen=(), repetitions=1).rows[0].bytes_per_token * 64
    halves = run(llm, interpreter, n_prompt=(64,), n_gen=(), ubatch=(32,), repetitions=1).rows[0].bytes_per_token * 64
    weights = llm.checkpoint.weights
    per_token = 2 * llm.config.num_layers * llm.config.kv_width * 2
    again = sum(w.nbytes for name, w in weights.items() if name not in ("embed.weight", "final_norm.weight"))
    assert halves - whole == pytest.approx(again + per_token * 32)


def test_bytes_of_a_screened_head() -> None:
    llm = GlassLLM(tiny.TINY)
    batch = Lane(llm.config, llm.interpreter, 8).batch([1], 0, head_top_k=1)
    sizes = {"embed.weight": 97 * 272}

    def head(rows: int) -> int:
        return traffic(llm.program, ["logits"], sizes, batch, kv_bytes_per_token=0, head_rows=rows).weight_bytes

    assert head(0) == 97 * 272
    assert head(8) == 97 * 176 + 97 * 16 + 8 * 272
    assert head(97) == 97 * (176 + 16 + 272)  # nothing was excluded: both passes were made
    assert HIGH_PLANE == 176 / 272


def test_every_step_counts_the_head_it_read() -> None:
    class Screening(Clocked):
        @property
        def head_rows_finished(self) -> int:
            return [0, 8, 97][(len(self.steps) - 1) % 3]  # read as a whole, screened, screened in vain

    llm: Any = GlassLLM()
    llm.interpreter = Screening(llm.config.vocab)
    size = llm.checkpoint.weights["embed.weight"].nbytes
    whole = run(llm, n_prompt=(), n_gen=(3,), repetitions=1, warm_up=False).rows[0].bytes_per_token * 3
    llm.interpreter = Screening(llm.config.vocab)
    row = run(llm, n_prompt=(), n_gen=(3,), repetitions=1, warm_up=False, head_top_k=1).rows[0]
    saved = size - (round(size * HIGH_PLANE) + 97 * 16 + size * 8 // 97)
    in_vain = round(size * HIGH_PLANE) + 97 * 16
    assert row.bytes_per_token * 3 == pytest.approx(whole - saved + in_vain)


def test_tensors_inside_a_group_do_not_move() -> None:
    llm = GlassLLM(tiny.TINY)
    batch = Lane(llm.config, llm.interpreter, 8).batch([1, 2, 3], 0)

    def values(*names: str) -> int:
        return traffic(llm.program, names, {}, batch, kv_bytes_per_token=0).activation_bytes // 4

    prefix, c = "layers.0.", llm.config
    projections = [prefix + name for name in ("attn_norm", "attn.q", "attn.k", "attn.v")]
    assert values(*projections) == 3 * (c.hidden + c.q_width + 2 * c.kv_width)
    assert values(*[prefix + f"mlp.{name}" for name in ("gate", "up", "act")]) == 3 * (c.hidden + c.intermediate)
    assert values("outputs") == 2 * c.hidden  # one row of three is kept


def test_sizes_are_those_the_interpreter_packed() -> None:
    llm = FakeLLM()
    assert weight_sizes(llm)["embed.weight"] == llm.checkpoint.weights["embed.weight"].nbytes
    llm.interpreter.packed_sizes = {"embed.weight": 5}
    assert weight_sizes(llm)["embed.weight"] == 5


def test_another_number_of_threads() -> None:
    class Choosing(Clocked):
        def with_threads(self, threads: int) -> Choosing:
            other = Choosing(self.vocab)
            other.threads = threads
            return other

    one = Choosing(10)
    assert with_threads(one, None) is one
    assert with_threads(one, 2) is one
    assert with_threads(one, 4).threads == 4
    assert with_threads(FakeLLM().interpreter, 4) is not None


# -- shown ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> Any:
    return run(GlassLLM(), n_prompt=(8,), n_gen=(4,), n_depth=(0, 16), repetitions=2)


def test_json_has_the_fields_that_llama_cpp_compares(result: Any) -> None:
    entries = json.loads(render(view.bench(result), "json", data=list(result.rows)))
    assert len(entries) == 4
    for entry in entries:
        assert set(entry) >= COMPARED
        assert set(entry) >= {"build_number", "model_size", "model_n_params", "avg_ns", "stddev_ns", "stddev_ts"}
        assert len(entry["samples_ns"]) == len(entry["samples_ts"]) == 2
        assert (entry["gpu_info"], entry["backends"]) == ("", "CPU")
        assert entry["test_time"].endswith("Z")
        assert entry["avg_ts"] == pytest.approx(statistics.fmean(entry["samples_ts"]))
    lines = [json.loads(line) for line in view.jsonl(result).splitlines()]
    assert lines == entries
    rows = list(csv.DictReader(io.StringIO(view.csv(result))))
    assert [row["test"] for row in rows] == ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"]
    assert set(rows[0]) >= COMPARED
    assert rows[0]["flash_attn"] == "1"


def test_tokenising_and_sampling_are_told_apart(result: Any) -> None:
    prefill, decode = result.rows[:2]
    assert prefill.tokenize_s is not None
    assert decode.tokenize_s is None
    assert all(row.sample_s is not None and row.sample_s > 0 for row in result.rows)
    for language in ("en", "zh"):
        text = render(view.bench(result, language), "md")
        assert "| test | t/s |" in text
        assert "tg4 @ d16" in text
    assert "Tokenising and sampling are not in these rates" in render(view.bench(result), "md")


# -- the command ------------------------------------------------------------------------------------------------------


def test_lists_and_ranges() -> None:
    assert counts(["512,1024"], "-p") == (512, 1024)
    assert counts(["1-8+1"], "-t") == tuple(range(1, 9))
    assert counts(["1-4", "16"], "-t") == (1, 2, 3, 4, 16)
    assert counts(["1-8+3"], "-t") == (1, 4, 7)
    assert counts(["128-1024*2"], "-p") == (128, 256, 512, 1024)
    assert counts(["0"], "-p") == (0,)
    assert counts(None, "-p") == ()
    for wrong in ("x", "1-", "8-1", "1-8+0", "1-8*1", "0-8*2", "-4", "1,,2", ""):
        with pytest.raises(typer.BadParameter, match="-p"):
            counts([wrong], "-p")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    loads: list[dict[str, Any]] = []

    def open_one(path: object, **loading: Any) -> GlassLLM:
        loads.append(loading)
        return GlassLLM()

    monkeypatch.setattr("cutaway.cli.loading.locate", lambda name: Path(name or "default"))
    monkeypatch.setattr("cutaway.llm.LLM", open_one)
    return loads


def cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        main(arguments)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def test_the_flags_of_llama_bench(capsys: pytest.CaptureFixture[str], opened: list[dict[str, Any]]) -> None:
    status, out, _ = cli(
        capsys, "bench", "-m", "m", "-p", "4,8", "-n", "0", "-pg", "4,2", "-d", "0,16", "-r", "1", "-b", "64",
        "-ub", "2", "-ctk", "q8_0", "-ctv", "f16", "-o", "jsonl",
    )  # fmt: skip
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["test"] for row in rows] == [
        "pp4", "pp8", "pp4+tg2", "pp4 @ d16", "pp8 @ d16", "pp4+tg2 @ d16",
    ]  # fmt: skip
    assert {(row["type_k"], row["type_v"], row["n_batch"], row["n_ubatch"]) for row in rows} == {("q8_0", "f16", 64, 2)}
    assert opened == [{"max_context": 24}]


def test_output_forms(capsys: pytest.CaptureFixture[str], opened: list[dict[str, Any]]) -> None:
    base = ("bench", "-p", "4", "-n", "2", "-r", "1", "-t", "1")
    assert "pp4" in cli(capsys, *base)[1]
    assert "| model | size | params | backend | threads | test | t/s |" in cli(capsys, *base, "-o", "md")[1]
    assert len(json.loads(cli(capsys, *base, "-o", "json")[1])) == 2
    assert cli(capsys, *base, "-o", "csv")[1].startswith('"build_commit"')
    assert "<!doctype html" in cli(capsys, *base, "-o", "html")[1].lower()
    assert cli(capsys, *base, "-o", "sql")[0] == 2
    assert cli(capsys, "bench", "-p", "four")[0] == 2
    assert cli(capsys, "bench", "-pg", "4")[0] == 2
    status, _, err = cli(capsys, "bench", "-p", "0", "-n", "0")
    assert (status, err.count("\n")) == (2, 1)
