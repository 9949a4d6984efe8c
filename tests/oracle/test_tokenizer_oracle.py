"""The tokenizer and the chat templates against three independent judges.

The 46 vectors of llama.cpp's Qwen2 vocabulary; a byte-pair encoder written here, slow and plain, over `regex`; and
transformers, reading the same GGUF file by itself.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from cutaway.files.checkpoint import Checkpoint
from cutaway.text.chat import ChatTemplate
from cutaway.text.tokenizer import Tokenizer, Vocabulary

regex = pytest.importorskip("regex")

VECTORS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "qwen2-tokenizer-vectors.inp"

Models = Callable[[str], Checkpoint]


def test_llama_cpp_vectors(qwen: Tokenizer) -> None:
    if not VECTORS.is_file():
        pytest.skip(f"{VECTORS} is not there")
    texts = VECTORS.read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = VECTORS.with_suffix(".out").read_text().splitlines()
    assert len(texts) == len(lines) == 46
    for text, line in zip(texts, lines, strict=True):
        assert qwen.encode(text) == [int(i) for i in line.split()], repr(text)
        assert qwen.decode(qwen.encode(text)) == text


# -- 5,000 strings -----------------------------------------------------------------------------------------------------

FRAGMENTS = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    " \n ",
    "\x00",
    "\x1b",
    "\u00a0",
    "\u3000",
    "\u200b",
    "\u200d",
    "e\u0301",
]
WORDS = """
    a e i o u stn ABC 0123456789 . , ; : ! ? - _ = + * / \\ ' " ( ) [ ] { } < > | @ # $ % ^ & ~ ` -> != //
    I'm we'VE it'Ll can't don’t ½ ² ٣ Ⅷ é ñ ß ſ İ ǆ 汉字 用一句话介绍 你好， ひらがな 한국어 สวัสดี עברית العربية हिन्दी
    нещо 🦙 👩‍💻 🇨🇳 🫠 𝒳 def f(x): return http://a.b/?c=d&e=f 1,234.56 2031-12-05 0xFF <tool_call> </tool_call>
    <|im <|im_end|> [PAD]
"""
FRAGMENTS += WORDS.split()


def random_texts(count: int = 5000) -> Iterator[str]:
    draw = random.Random(0)
    # characters that every Unicode table in play knows: those of Unicode 3.2
    known = [chr(c) for c in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")]
    for _ in range(count):
        one = lambda: draw.choice(FRAGMENTS) if draw.random() < 0.8 else draw.choice(known)  # noqa: E731
        yield "".join(one() for _ in range(draw.randrange(1, 25)))


MODERN = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"]
MODERN += [r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
SPLITS = {
    "qwen2": "|".join(MODERN),
    "llama-bpe": "|".join(MODERN).replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


class PlainEncoder:
    """Byte-pair encoding as it is described: split, then again and again join the pair of the lowest rank."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.pre = vocabulary.pre
        self.split = regex.compile(SPLITS["gpt-2" if self.pre == "smollm" else self.pre])
        types = [1] * len(vocabulary.tokens) if vocabulary.token_types is None else list(vocabulary.token_types)
        self.ids = {t: i for i, t in enumerate(vocabulary.tokens) if types[i] == 1}
        self.own = {t: i for i, t in enumerate(vocabulary.tokens) if types[i] == 4}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(vocabulary.merges)}
        letters = [b for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD)]
        others = [b for b in range(256) if b not in letters]
        self.alphabet = {b: chr(b) for b in letters} | {b: chr(256 + n) for n, b in enumerate(others)}
        self.word = lru_cache(100_000)(self.word)

    def encode(self, text: str) -> list[int]:
        pieces = regex.split("(" + "|".join(map(regex.escape, self.own)) + ")", text) if self.own else [text]
        return [i for piece in pieces for i in ([self.own[piece]] if piece in self.own else self.plain(piece))]

    def plain(self, text: str) -> list[int]:
        runs = regex.split(r"(\p{N})", text) if self.pre == "smollm" else [text]
        return [i for run in runs for word in self.split.findall(run) for i in self.word(word)]

    def word(self, word: str) -> list[int]:
        parts = [self.alphabet[b] for b in word.encode()]
        if self.pre == "llama-bpe" and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        parts = [part for part in parts if part in self.ids]
        while True:
            pairs = [(self.ranks[pair], n) for n, pair in enumerate(pairwise(parts)) if pair in self.ranks]
            if not pairs:
                return [self.ids[part] for part in parts]
            _, n = min(pairs)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pre"),
    [
        ("qwen2.5-coder-0.5b", "qwen2"),
        ("smollm2-135m", "smollm"),
        ("smollm2-135m", "llama-bpe"),
        ("smollm2-135m", "gpt-2"),
    ],
)
def test_random_strings_against_a_plain_encoder(model: str, pre: str, catalogue_model: Models) -> None:
    vocabulary = replace(catalogue_model(model).vocabulary, pre=pre)
    ours, plain = Tokenizer.from_vocabulary(vocabulary), PlainEncoder(vocabulary)
    for text in random_texts():
        ids = ours.encode(text)
        assert ids == plain.encode(text), repr(text)
        if model.startswith("qwen"):  # SmolLM2 has no token for a few bytes
            assert ours.decode(ids) == text


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer(catalogue_model: Models) -> Callable[[str], Any]:
    """transformers' own tokenizer, made from the same GGUF file without our help."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")

    @lru_cache
    def tokenizer(model: str) -> Any:
        path = catalogue_model(model).path
        theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if model.startswith("smollm"):  # of a llama GGUF it does not read `tokenizer.ggml.pre`
            digits, words = (
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            )
            theirs._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
        return theirs

    return tokenizer


MODELS = pytest.mark.parametrize("model", ["qwen2.5-coder-0.5b", "smollm2-135m"])


@pytest.mark.slow
@MODELS
def test_random_strings_against_transformers(
    model: str, peer: Callable[[str], Any], catalogue_model: Models, tmp_path: Path
) -> None:
    theirs = peer(model)
    theirs.save_pretrained(tmp_path)
    ours = {
        "GGUF": Tokenizer.from_vocabulary(catalogue_model(model).vocabulary),
        "tokenizer.json": Tokenizer.from_vocabulary(Vocabulary("hf", tokenizer_json=tmp_path / "tokenizer.json")),
    }
    for text in random_texts():
        expected = theirs.encode(text, add_special_tokens=False)
        for source, tokenizer in ours.items():
            assert tokenizer.encode(text, special=True) == expected, (source, text)
            assert tokenizer.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False), text


TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
CHATS = [
    [{"role": "user", "content": "用一句话介绍什么是 Transformer。"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b\n\n"},
    ],
    [{"role": "user", "content": "1 < 2 && \"x\" | 'y' </think>"}, {"role": "assistant", "content": ""}],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
        {"role": "user", "content": "thanks"},
    ],
]


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
def test_chat_templates_against_transformers(
    model: str,
    chat: list[dict],
    tools: list[dict] | None,
    prompt: bool,
    peer: Callable[[str], Any],
    catalogue_model: Models,
) -> None:
    tokenizer = Tokenizer.from_vocabulary(catalogue_model(model).vocabulary)
    source = catalogue_model(model).chat_template
    assert source is not None
    template = ChatTemplate(source, tokenizer.special_tokens)
    how = {"tools": tools, "add_generation_prompt": prompt}
    theirs = peer(model)
    assert template.render(chat, **how) == theirs.apply_chat_template(chat, tokenize=False, **how)
    assert template.render_ids(tokenizer, chat, **how) == theirs.apply_chat_template(chat, return_dict=False, **how)
