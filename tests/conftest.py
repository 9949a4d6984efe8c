"""Fixtures every test may use. Helpers to import lie beside this file: `tiny.py` (models), `steps.py` (batches)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers, whatever pytest's import mode

import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_folder("qwen2")`: that variant of `tiny.VARIANTS` as a Hugging Face folder, written once a session."""
    folders: dict[str, Path] = {}

    def folder(variant: str = "qwen2") -> Path:
        if variant not in folders:
            folders[variant] = tiny.save(tmp_path_factory.mktemp(variant), tiny.VARIANTS[variant])
        return folders[variant]

    return folder
