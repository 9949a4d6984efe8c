"""FakeLLM with what the experiments on the KV cache, on sampling and the report ask besides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny
from fake_llm import FakeLLM

from cutaway.config import ModelConfig

HEAD_32 = replace(tiny.TINY, head_dim=32)  # a head that q8_0 can group


class GlassLLM(FakeLLM):
    def __init__(self, config: ModelConfig = HEAD_32, **more: Any) -> None:
        super().__init__(config, **more)
        self.k_type = self.v_type = "f32"
        self.tokenizer.eos_ids = frozenset({0})  # type: ignore[attr-defined]
        weights = self.checkpoint.weights
        self.checkpoint = SimpleNamespace(
            **vars(self.checkpoint),
            chat_template=self.chat_template,
            files=[Path("/somewhere/tiny.gguf")],
            nbytes=sum(weight.nbytes for weight in weights.values()),
            params=sum(weight.data.size // 4 for weight in weights.values()),
            generation={},
        )
