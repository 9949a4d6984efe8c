"""The verbs trace, diff, compare, perplexity and score: their options reach the experiments, their results the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_llm import FakeLLM

from cutaway.cli import main
from cutaway.cli.conditions import LOADING, SAMPLING, labels, settings
from cutaway.experiments.tensors import load_tensors

PROMPT = "Hello, world"


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """Every verb opens a tiny model; `activations=f32` is one with other weights."""
    llm = FakeLLM()

    def open_one(path: object, **loading: Any) -> FakeLLM:
        return FakeLLM(format="Q8_0", name="other") if loading.get("activations") == "f32" else llm

    monkeypatch.setattr("cutaway.cli.loading.locate", lambda name: Path(name or "default"))
    monkeypatch.setattr("cutaway.llm.LLM", open_one)
    return llm


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        main(arguments)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: FakeLLM) -> None:
    saved = tmp_path / "t.npz"
    status, out, err = run(
        capsys, "trace", PROMPT, "--json", "--tap", "logits", "--attention", "1:2", "--last-rows", "2",
        "--lens", "3", "--answer", "x", "--save", str(saved),
    )  # fmt: skip
    assert status == 0
    result = json.loads(out)
    assert result["ids"] == model.tokenize(PROMPT)
    assert [row["name"] for row in result["table"]] == model.program.names
    assert (result["attention"][0]["layer"], result["attention"][0]["heads"]) == (1, [2])
    assert result["attention"][0]["rows"] == [10, 11]
    assert result["lens"]["positions"] == [9, 10, 11]
    assert result["lens"]["answers"] == model.tokenize("xxx")
    assert str(saved) in err
    np.testing.assert_array_equal(load_tensors(saved)["logits"], model.forward(model.tokenize(PROMPT)))


def test_trace_in_the_terminal_and_as_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run(capsys, "trace", PROMPT, "--all-layers", "--lens", "0")
    assert status == 0
    assert "layers.1.mlp.act" in out
    assert "Logit lens" not in out
    status, out, _ = run(capsys, "trace", PROMPT, "--chat", "--lang", "zh", "-o", str(tmp_path / "t.html"))
    assert (status, out) == (0, "")
    assert "残差流" in (tmp_path / "t.html").read_text("utf-8")


def test_trace_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "trace", PROMPT, "--attention", "a:b")[0] == 2
    status, _, err = run(capsys, "trace", PROMPT, "--save", str(tmp_path / "t.pkl"))
    assert status == 2
    assert "tensors are saved as .npz or .safetensors, not t.pkl" in err
    status, _, err = run(capsys, "trace", PROMPT, "--tap", "layers.9.*")
    assert status == 1
    assert err.count("\n") == 1


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "diff", "m", "-p", PROMPT)
    assert status == 0
    assert "same, bit for bit" in out
    status, out, _ = run(
        capsys, "diff", "m", "--b", "activations=f32", "-p", PROMPT, "--json", "--tap", "layers.*.mlp.up"
    )
    result = json.loads(out)
    assert [tap["name"] for tap in result["taps"]] == ["layers.0.mlp.up", "layers.1.mlp.up"]
    assert (result["label_a"], result["label_b"]) == ("default", "activations=f32")
    assert result["taps"][0]["departs"]


def test_diff_against_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: FakeLLM) -> None:
    path = tmp_path / "theirs.npz"
    logits = model.forward(model.tokenize(PROMPT))
    np.savez(path, logits=logits[None] + 1, other=logits)
    status, out, err = run(capsys, "diff", "m", str(path), "-p", PROMPT)
    assert status == 0
    assert "first tap that departs is logits" in out
    assert "names unknown here: other" in err
    np.savez(path, logits=logits, token_ids=np.array(model.tokenize(PROMPT)))
    status, out, _ = run(capsys, "diff", "m", str(path))  # no prompt: the file says what was read
    assert "same, bit for bit" in out
    np.savez(path, other=logits)
    status, _, err = run(capsys, "diff", "m", str(path), "-p", PROMPT)
    assert status == 1
    assert "holds no tensor to compare" in err


def test_compare(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.")
    arguments = ["compare", "m", "--b", "template=raw", "--b", "temperature=1", "-p", "Hi", "--max-tokens", "3"]
    status, out, _ = run(capsys, *arguments, "--text", str(text), "--window", "16", "--json")
    assert status == 0
    result = json.loads(out)
    assert (result["a"]["chat"], result["b"]["chat"]) == (True, False)
    assert (result["a"]["label"], result["b"]["label"]) == ("default", "template=raw temperature=1")
    assert len(result["b"]["ids"]) == 3
    assert result["perplexity_a"]["window"] == 16
    assert run(capsys, "compare", "m", "--b", "template=none", "-p", "Hi")[0] == 2
    assert run(capsys, "compare", "m", "--b", "speed=9", "-p", "Hi")[0] == 2
    assert "Two answers side by side" in run(capsys, *arguments)[1]


def test_perplexity_and_score(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: FakeLLM) -> None:
    text = tmp_path / "t.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.")
    status, out, _ = run(capsys, "perplexity", str(text), "--window", "8", "--stride", "2", "--chunks", "3", "--json")
    assert status == 0
    result = json.loads(out)
    assert (result["window"], result["stride"], len(result["running"])) == (8, 2, 3)
    status, out, _ = run(capsys, "perplexity", str(text), "--window", "8", "--rule", "llama.cpp")
    assert "PPL" in out
    assert run(capsys, "perplexity", str(text), "--rule", "other")[0] == 2
    status, _, err = run(capsys, "perplexity", str(tmp_path / "none"))
    assert (status, err.count("\n")) == (1, 1)
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    assert "wrong byte at offset 3" in run(capsys, "perplexity", str(tmp_path / "bytes"))[2]

    by_argument = json.loads(run(capsys, "score", "Hello", "--json")[1])
    assert [token["text"] for token in by_argument["tokens"]] == list("Hello")
    by_file = json.loads(run(capsys, "score", "--file", str(text), "--json")[1])
    assert by_file["text"] == text.read_text()
    assert run(capsys, "score", "Hello", "--file", str(text))[0] == 2


def test_settings() -> None:
    given = ["kv-type=q8_0", "threads=2", "prefix_cache=off", "temperature=0.5"]
    known = LOADING | SAMPLING
    assert settings(given, known, "--a") == {
        "kv_type": "q8_0", "threads": 2, "prefix_cache": False, "temperature": 0.5,
    }  # fmt: skip
    import typer

    for wrong in ("threads", "threads=two", "prefix_cache=maybe", "nothing=1"):
        with pytest.raises(typer.BadParameter, match="--a"):
            settings([wrong], known, "--a")


def test_labels() -> None:
    assert labels(("m", None), ([], ["kv_type=f32"])) == ("default", "kv_type=f32")
    assert labels(("m", "n"), ([], ["kv_type=f32"])) == ("m", "n kv_type=f32")
    assert labels(("m", "m"), ([], [])) == ("default (A)", "default (B)")
