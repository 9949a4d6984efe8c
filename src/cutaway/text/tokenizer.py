"""Text to token ids and back.

Holds `Vocabulary`, what a model's files say about their tokens, and `Tokenizer`, which the `tokenizers` library
computes. It opens no model file (it is given a Vocabulary) and knows no message and no template. Read next:
`chat.py`, which turns messages into ids; `detokenizer.py`, which turns ids into text while they stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Vocabulary"]


@dataclass(frozen=True)
class Vocabulary:
    """What a model's files say about their tokens: the lists of a GGUF file, or a Hugging Face tokenizer.json.

    `token_types` are GGUF's: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    `merges` are pairs "left right" in order of rank; `pre` names the rule that splits text before merging.
    """

    kind: Literal["gguf", "hf"]
    tokens: Sequence[str] = ()
    token_types: Sequence[int] | None = None
    merges: Sequence[str] = ()
    pre: str = ""
    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False
    tokenizer_json: Path | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
