"""The examples run, on the real small model, and the notebook's cells run in order."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def small_model() -> None:
    home = Path(os.environ.get("CUTAWAY_HOME", Path.home() / ".cache" / "cutaway"))
    if not (home / "models" / f"{MODEL}.gguf").is_file():
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
