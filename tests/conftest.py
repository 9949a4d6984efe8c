"""Fixtures every test may use. Helpers to import lie beside this file: `tiny.py` (models), `steps.py` (batches)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers, whatever pytest's import mode

import tiny

from cutaway.files import checkpoint, store
from cutaway.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_folder("qwen2")`: that variant of `tiny.VARIANTS` as a Hugging Face folder, written once a session."""
    folders: dict[str, Path] = {}

    def folder(variant: str = "qwen2") -> Path:
        if variant not in folders:
            folders[variant] = tiny.save(tmp_path_factory.mktemp(variant), tiny.VARIANTS[variant])
        return folders[variant]

    return folder


@pytest.fixture(scope="session")
def catalogue_model() -> Callable[[str], checkpoint.Checkpoint]:
    """`catalogue_model("smollm2-135m")`: that model, opened once a session; skips the test where it was not pulled."""
    models: dict[str, checkpoint.Checkpoint] = {}

    def model(name: str) -> checkpoint.Checkpoint:
        if name not in models:
            path = store.home() / "models" / f"{name}.gguf"
            if not path.is_file():
                pytest.skip(f"{path} is not there (cutaway pull {name})")
            models[name] = checkpoint.load(path)
        return models[name]

    return model


@pytest.fixture(scope="session")
def qwen(catalogue_model: Callable[[str], checkpoint.Checkpoint]) -> Tokenizer:
    """The tokenizer of Qwen2.5 (Qwen2 and Qwen3 share it)."""
    return Tokenizer.from_vocabulary(catalogue_model("qwen2.5-coder-0.5b").vocabulary)


@pytest.fixture(scope="session")
def smollm(catalogue_model: Callable[[str], checkpoint.Checkpoint]) -> Tokenizer:
    """The tokenizer of SmolLM2."""
    return Tokenizer.from_vocabulary(catalogue_model("smollm2-135m").vocabulary)
