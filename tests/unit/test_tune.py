"""The sweep over numbers of threads on an interpreter with known times, and what the default is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from glass_llm import GlassLLM

from cutaway.cli import main
from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.tune import Cores, cores, sweep, threads
from cutaway.forward.native import kernel_of, usable_cores
from cutaway.forward.program import TopLogits
from cutaway.render import render
from cutaway.render.views.tune import threads as view

MACHINE = Cores(logical=8, allowed=4, physical=2, quota=None, default=2)


class Clocked:
    """Prefill gains from every thread; decode is fastest with two, and slow past the four processors."""

    now_ns = 0
    order: list[int]

    def __init__(self, count: int = 2) -> None:
        self.threads = count

    def with_threads(self, count: int) -> Clocked:
        return Clocked(count)

    def run(self, batch: Any, kv_cache: Any, taps: Any = None) -> TopLogits:
        tokens = len(batch.token_ids)
        seconds = (
            tokens * 0.01 / self.threads if tokens > 1 else {1: 0.2, 2: 0.1, 3: 0.125, 4: 0.125}.get(self.threads, 1)
        )
        Clocked.now_ns += round(1e9 * seconds)
        if tokens > 1:
            Clocked.order.append(self.threads)
        return TopLogits(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))


@pytest.fixture
def llm() -> Any:
    llm: Any = GlassLLM()
    Clocked.order = []
    llm.interpreter = Clocked()
    return llm


def run(llm: Any, **more: Any) -> Any:
    return threads(llm, found=MACHINE, clock_ns=lambda: Clocked.now_ns, **{"prompt": 40, "tokens": 8, **more})


def test_rates_and_the_best(llm: Any) -> None:
    result = run(llm)
    assert [(r.threads, round(r.prefill_tokens_s), round(r.decode_tokens_s)) for r in result.rows] == [
        (1, 100, 5),
        (2, 200, 10),
        (3, 300, 8),
        (4, 400, 8),
    ]
    assert (result.best_prefill, result.best_decode) == (4, 2)
    assert Clocked.order == [1, 2, 3, 4] * 4  # in turn; the first round warms up
    assert all(len(r.decode_samples) == 3 for r in result.rows)


def test_twice_as_many(llm: Any) -> None:
    assert [r.threads for r in run(llm, oversubscribe=True, rounds=1).rows] == list(range(1, 9))
    assert [r.threads for r in run(llm, counts=[4, 1, 4], rounds=1).rows] == [1, 4]


def test_of_equals_the_smaller_number_is_best(llm: Any) -> None:
    assert run(llm, counts=[3, 4], rounds=1).best_decode == 3


def test_sweep() -> None:
    assert sweep(2) == [1, 2]
    assert sweep(2, True) == [1, 2, 3, 4]
    assert sweep(22) == [*range(1, 17), 20, 22]
    assert sweep(1) == [1]
    assert sweep(64, True)[-3:] == [96, 112, 128]


def test_refusals(llm: Any) -> None:
    for wrong in ({"counts": [0, 1]}, {"counts": []}, {"prompt": 0}, {"tokens": 0}, {"rounds": 0}):
        with pytest.raises(RequestError):
            run(llm, **wrong)
    with pytest.raises(ContextLengthError, match=r"250 \+ 8"):
        run(llm, prompt=250)


def test_what_the_default_is_made_of(tmp_path: Path) -> None:
    found = cores()
    assert found.default == usable_cores()
    assert 1 <= found.default <= found.allowed <= found.logical
    import os

    cpus = tmp_path / "cpus"
    for number in os.sched_getaffinity(0):
        topology = cpus / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text("0\n")  # all of them threads of one core
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    told = cores(cpus, tmp_path)
    assert (told.physical, told.quota) == (1, 1.5)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(cpus, tmp_path).quota is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(tmp_path / "none", tmp_path) == Cores(found.logical, found.allowed, None, 2.0, found.default)
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores(cpus, tmp_path).quota is None


def test_shown(llm: Any) -> None:
    result = run(llm)
    text = render(view(result), "md")
    assert "best prefill" in text
    assert "best decode, default" in text
    assert "The default is 2 thread(s)" in text
    assert "默认 2 个线程" in render(view(result, "zh"), "md")
    assert "Rate by number" not in render(view(run(llm, counts=[2])), "md")


def test_the_verb(llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loads: list[dict[str, Any]] = []

    def open_one(path: object, **loading: Any) -> Any:
        loads.append(loading)
        return llm

    monkeypatch.setattr("cutaway.cli.loading.locate", lambda name: Path(name or "default"))
    monkeypatch.setattr("cutaway.llm.LLM", open_one)
    with pytest.raises(SystemExit) as end:
        main(["tune", "threads", "--try", "1-3", "-p", "8", "-n", "2", "-r", "1", "--json"])
    assert end.value.code == 0
    assert [row["threads"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 2, 3]
    assert loads == [{"max_context": 10}]
    with pytest.raises(SystemExit) as end:
        main(["tune", "threads", "--try", "few"])
    assert end.value.code == 2


def test_kernels_by_format() -> None:
    assert kernel_of("Q5_0") == "panel kernel, int8 activations"
    assert kernel_of("Q5_0", "f32") == "panel kernel, float32 activations"
    assert kernel_of("BF16") == "panel kernel, float32 activations"
    assert kernel_of("Q9_9") == "no kernel"
