"""docs/experiments.md: its Python runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cutaway.files import store

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"


@pytest.mark.slow
def test_the_python_block_runs(tmp_path: Path) -> None:
    if store.DEFAULT not in [here.name for here in store.installed()]:
        pytest.skip("the default model is not here: cutaway pull")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bench.html").read_text("utf-8").startswith("<!doctype html>")
    assert "温度" in (tmp_path / "temperatures.md").read_text("utf-8")
    cold, hot = map(float, re.findall(r"[\d.]+", done.stdout))
    assert cold < hot
