"""The examples run, on the real small model, and the notebook's cells run in order. Transformers' dump also runs on
tiny models, and Cutaway is compared with it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from cutaway.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "smollm2-135m"
SCRIPTS = sorted(EXAMPLES.glob("[0-9]*.py"))

SAYS = {  # what the output must hold
    "01_shapes": ["embed                  (1, 576)", "logits                 (1, 49152)", "30 layers"],
    "02_kv_cache": ["23,040 bytes", "without the cache"],
    "03_greedy_and_sampling": ["greedy 1,", "seeded 1 different texts"],
    "04_temperature": ["T = 0.3", "T = 1.5"],
    "05_tap_and_patch": ["after layer  0", "after layer 27"],
    "06_logit_lens": ["layers.29.residual", "' Paris'", "number 1"],
    "07_attention": ["layer 15 head  8"],
    "08_score": ["' banana'", "PPL = "],
}


def test_every_example_is_known_and_named_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text("utf-8")
    assert [path.stem for path in SCRIPTS] == sorted(SAYS)
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"[{path.name}]({path.name})" in readme


def test_an_example_is_a_dozen_lines() -> None:
    for path in SCRIPTS:
        lines = path.read_text("utf-8").split('"""', 2)[2].splitlines()
        code = [line for line in lines if line.strip() and not line.startswith(("import ", "from "))]
        assert len(code) <= 16, path.name


def test_the_notebook_is_small_and_clean() -> None:
    path = EXAMPLES / "glass_box.ipynb"
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert path.stat().st_size < 16 * 1024
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def models() -> Path:
    return Path(os.environ.get("CUTAWAY_HOME", Path.home() / ".cache" / "cutaway")) / "models"


@pytest.fixture
def small_model() -> None:
    if not (models() / f"{MODEL}.gguf").is_file():
        pytest.skip(f"{MODEL} is not here: cutaway pull {MODEL}")


@pytest.mark.slow
@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), MODEL])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    for expected in SAYS[path.stem]:
        assert expected in said


# -- a dump of transformers, and `cutaway diff` against it -------------------------------------------------------------

DUMP = EXAMPLES / "dump_transformers.py"
F32 = ["--a", "activations=f32", "--a", "kv_type=f32", "--a", "threads=1"]


def dump_and_diff(
    model: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Run the example, then the command that its first line names, as they stand; the result as JSON gives it."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    monkeypatch.setattr(sys, "argv", [str(DUMP), str(model), "The capital of France is", str(path)])
    runpy.run_path(str(DUMP), run_name="__main__")
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        main(["diff", str(model), str(path), *F32, "--json"])
    out, err = capsys.readouterr()
    assert out, err
    assert "not compared" not in err
    return json.loads(out)


def with_tokenizer(folder: Path) -> Path:
    """Put a tokenizer of single printable characters beside a tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["\u0120", *map(chr, range(0x21, 0x7F))]  # a space is spelled so in byte-level vocabularies
    library = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("variant", ["qwen2", "qwen3-untied-explicit-head-dim", "llama-llama3"])
def test_a_dump_of_transformers_agrees(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.VARIANTS[variant]
    folder = with_tokenizer(tiny.save(tmp_path / variant, config))
    dump = tmp_path / "theirs.npz"
    taps = dump_and_diff(folder, dump, monkeypatch, capsys)["taps"]
    expected = ["embed", *(f"layers.{i}.residual" for i in range(config.num_layers - 1)), "final_norm", "logits"]
    assert [tap["name"] for tap in taps] == expected
    assert taps[0]["equal_bits"]
    assert [tap["name"] for tap in taps if tap["relative"] > 1e-5] == []

    # A difference in one layer's residual, and in nothing else, is found where it is.
    with np.load(dump) as file:
        tensors = dict(file)
    assert len(tensors["token_ids"]) == len("The capital of France is")
    tensors["hidden_states.1"] = tensors["hidden_states.1"] * np.float32(1.01)
    np.savez(dump, **tensors)
    with contextlib.suppress(SystemExit):
        main(["diff", str(folder), str(dump), *F32])
    assert "first tap that departs is layers.0.residual" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("small_model")
def test_a_dump_of_a_gguf_file_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real small model: transformers dequantises the same file."""
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    found = dump_and_diff(models() / f"{MODEL}.gguf", tmp_path / "theirs.npz", monkeypatch, capsys)
    assert len(found["taps"]) == 32  # embed, 29 residuals, the final norm, logits
    assert max(tap["relative"] for tap in found["taps"]) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("small_model")
def test_notebook_runs() -> None:
    cells = json.loads((EXAMPLES / "glass_box.ipynb").read_text("utf-8"))["cells"]
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # its own file, not a stranger's
    assert "the answer is number 1" in said.getvalue()
