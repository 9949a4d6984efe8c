"""text/tokenizer.py: public bug reports on tokenisation, and vocabularies small enough to read."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from cutaway.errors import FormatError, RequestError, UnsupportedError
from cutaway.text.tokenizer import Tokenizer, Vocabulary

BYTES = [chr(b) for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]] + [
    chr(256 + n) for n in range(68)
]
SPACE = "Ġ"  # the byte-level alphabet's space

# 256 bytes, three words, a control token, a user-defined one and an unused one
TOY = Vocabulary(
    "gguf",
    tokens=[*BYTES, "hi", "hi!", f"{SPACE}hi", "<|end|>", "<tool>", "[PAD0]"],
    token_types=[1] * 259 + [3, 4, 5],
    merges=["h i", "hi !", f"{SPACE} hi"],
    pre="qwen2",
    eos_id=259,
)


@pytest.fixture(scope="module")
def toy() -> Tokenizer:
    return Tokenizer.from_vocabulary(TOY)


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(i) for i in ids]


# -- a vocabulary one can read -----------------------------------------------------------------------------------------


def test_merges_by_rank_inside_the_splits(toy: Tokenizer) -> None:
    assert names(toy, toy.encode("hi hi")) == ["hi", " hi"]
    assert names(toy, toy.encode("hi!")) == ["hi", "!"], "'hi!' is a token, but the split comes first"


def test_control_tokens_stay_text_unless_asked_for(toy: Tokenizer) -> None:
    assert toy.encode("hi<|end|>", special=True) == [256, 259]
    assert toy.encode("hi<|end|>") == [256, *toy.encode("<|end|>")]
    assert 259 not in toy.encode("<|end|>")
    assert toy.decode(toy.encode("<|end|>")) == "<|end|>"


def test_user_defined_tokens_are_always_read_and_unused_ones_never(toy: Tokenizer) -> None:
    assert toy.encode("a<tool>b") == toy.encode("a<tool>b", special=True) == [*toy.encode("a"), 260, *toy.encode("b")]
    assert 261 not in toy.encode("[PAD0]", special=True)


def test_a_shield_keeps_a_control_token_text(toy: Tokenizer) -> None:
    assert toy.encode("<|end|><777|end|>", special=True, shield="777") == [259, *toy.encode("<|end|>")]


def test_llama_takes_a_word_that_is_a_token_as_it_is() -> None:
    tokens = [*BYTES, "xyz", "END"]
    types = [1] * 257 + [3]
    for pre, pieces in (("llama-bpe", ["xyz"]), ("qwen2", ["x", "y", "z"])):
        tokenizer = Tokenizer.from_vocabulary(Vocabulary("gguf", tokens=tokens, token_types=types, pre=pre))
        assert names(tokenizer, tokenizer.encode("xyz")) == pieces
        assert names(tokenizer, tokenizer.encode("END")) == ["E", "N", "D"], "a control token, typed"
        assert tokenizer.encode("END", special=True) == [257]


def test_what_an_id_is(toy: Tokenizer) -> None:
    assert toy.is_special(259)
    assert not toy.is_special(260)
    assert toy.vocab_size == 262
    assert toy.eos_ids == {259}
    assert toy.special_tokens == {"eos_token": "<|end|>"}
    assert toy.token_bytes(BYTES.index("ÿ")) == b"\xff"
    assert toy.token_text(BYTES.index("ÿ")) == r"\xff"
    assert [toy.token_bytes(i) for i in (258, 259, 260)] == [b" hi", b"<|end|>", b"<tool>"]


def test_decode_keeps_or_skips_control_tokens(toy: Tokenizer) -> None:
    assert toy.decode([256, 259, 258]) == "hi<|end|> hi"
    assert toy.decode([256, 259, 258], skip_special=True) == "hi hi"


def test_decode_joins_bytes_before_it_reads_them(toy: Tokenizer) -> None:
    ids = [BYTES.index(chr(b)) if b < 0x80 else toy.encode("é")[n] for n, b in enumerate("é".encode())]
    assert toy.decode(ids) == "é"
    assert toy.decode(ids[:1]) == "�"
    assert toy.decode([ids[0], ids[0], ids[1]]) == "�é"


def test_decoding_builds_nothing() -> None:
    broken = Tokenizer.from_vocabulary(replace(TOY, merges=["no such"]))
    assert broken.decode([256, 258]) == "hi hi"
    with pytest.raises(FormatError, match="merges"):
        broken.prepare()


def test_a_text_whose_merges_are_broken_changes_nothing_for_others() -> None:
    partly = Tokenizer.from_vocabulary(replace(TOY, merges=[*TOY.merges, "q z"]))  # there is no token qz
    before = partly.encode("hi")
    for _ in range(2):
        with pytest.raises(FormatError, match="merges"):
            partly.encode("qz")
        with pytest.raises(FormatError, match="merges"):
            partly.prepare()
        assert partly.encode("hi") == before


def test_no_normalisation_without_a_file_that_asks(toy: Tokenizer) -> None:
    decomposed = "e\u0301"
    assert toy.decode(toy.encode(decomposed)) == decomposed


def test_a_token_twice_is_an_error() -> None:
    with pytest.raises(FormatError, match="twice"):
        Tokenizer.from_vocabulary(replace(TOY, tokens=[*TOY.tokens[:-1], "hi"], token_types=None)).prepare()


def test_token_types_must_match() -> None:
    with pytest.raises(FormatError, match="token types"):
        Tokenizer.from_vocabulary(replace(TOY, token_types=[1]))


@pytest.mark.parametrize("pre", ["tekken", ""])
def test_unknown_splits_are_refused_by_name(pre: str) -> None:
    with pytest.raises(UnsupportedError, match=pre or "no tokenizer.ggml.pre"):
        Tokenizer.from_vocabulary(replace(TOY, pre=pre))


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_other_vocabulary_kinds_are_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedError, match=model):
        Tokenizer.from_vocabulary(replace(TOY, model=model))


def test_lone_surrogates_are_the_callers_error(toy: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        toy.encode("hi\ud800")


def test_a_model_without_a_tokenizer_says_so() -> None:
    tokenizer = Tokenizer.from_vocabulary(Vocabulary("hf"))
    assert tokenizer.decode([0, 5]) == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        tokenizer.encode("hi")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "90210", "9|0|2|1|0"),
        ("smollm", "90210", "9|0|2|1|0"),
        ("llama-bpe", "90210", "902|10"),
        ("gpt-2", "90210", "90210"),
        ("qwen2", "I'M", "I|'M"),
        ("smollm", "I'M", "I|'|M"),
        ("qwen2", "a.b\n\nc", "a|.b|\n\n|c"),
        ("gpt-2", "a.b\n\nc", "a|.|b|\n|\n|c"),
    ],
)
def test_splits(pre: str, text: str, pieces: str) -> None:
    """With every run of characters mergeable, what is left apart is the split."""
    words = sorted({text[a:b] for a in range(len(text)) for b in range(a + 2, len(text) + 1)}, key=len)
    coded = [word.replace("\n", "Ċ") for word in words]
    merges = [f"{word[:cut]} {word[cut:]}" for word in coded for cut in range(1, len(word))]
    vocabulary = replace(TOY, tokens=[*BYTES, *coded], token_types=None, merges=merges, pre=pre, eos_id=None)
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    assert names(tokenizer, tokenizer.encode(text)) == pieces.split("|")


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def saved(library: tokenizers.Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece-style vocabulary: spaces as a mark, one put before every text, unknown bytes as <0xNN>."""
    words = ["▁The", "▁cat", "▁sat"]
    tokens = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"Thecats"]
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            tokens.append(word[:end])
    ids = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    library = tokenizers.Tokenizer(models.BPE(ids, list(dict.fromkeys(merges)), byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>"])
    path = saved(library, tmp_path_factory.mktemp("spm"))
    return Tokenizer.from_vocabulary(Vocabulary("hf", tokenizer_json=path, tokenizer_config={"bos_token": "<s>"}))


def test_sentencepiece_loses_only_its_own_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("The cat sat")
    assert [sentencepiece.token_bytes(i) for i in ids] == [b" The", b" cat", b" sat"]
    assert sentencepiece.decode(ids) == "The cat sat"
    assert sentencepiece.decode(sentencepiece.encode("  The")) == "  The"
    assert sentencepiece.decode(sentencepiece.encode("é汉")) == "é汉", "bytes without a token of their own"


def test_sentencepiece_control_tokens(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.bos_id == 1
    assert not sentencepiece.add_bos
    assert sentencepiece.encode("<s>The", special=True)[0] == 1
    assert 1 not in sentencepiece.encode("<s>The")
    assert sentencepiece.decode(sentencepiece.encode("<s>The")) == "<s>The"
    assert sentencepiece.token_bytes(sentencepiece.vocab_size) == b"", "an alias is no token"


def byte_level(**habits: bool) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(BYTES)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    library.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **habits)])
    return library


def test_tokenizer_json_is_read_as_it_stands(tmp_path: Path) -> None:
    library = byte_level(rstrip=True)
    library.normalizer = normalizers.NFC()
    library.enable_truncation(3)
    library.enable_padding(length=9)
    text = "e\u0301<|end|> \n x<tool>"
    tokenizer = Tokenizer.from_vocabulary(Vocabulary("hf", tokenizer_json=saved(library, tmp_path)))
    library.no_truncation()
    library.no_padding()
    assert tokenizer.encode(text, special=True) == library.encode(text).ids, "with the token's own stripping"
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("e\u0301", "é"), "NFC, because the file says so"


def test_add_bos_is_read_from_the_post_processor(tmp_path: Path) -> None:
    library = byte_level()
    bos = library.token_to_id("<|end|>")
    library.post_processor = tokenizers.processors.TemplateProcessing("<|end|> $A", None, [("<|end|>", bos)])
    config = {"bos_token": {"content": "<|end|>"}}
    vocabulary = Vocabulary("hf", tokenizer_json=saved(library, tmp_path), tokenizer_config=config)
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    assert (tokenizer.bos_id, tokenizer.add_bos) == (bos, True)
    assert tokenizer.encode("a") == [BYTES.index("a")]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"model": {"type": "BPE"}}', b"[" * 100_000, b"\xff\xfe"])
def test_damaged_tokenizer_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="is not a tokenizer"):
        Tokenizer.from_vocabulary(Vocabulary("hf", tokenizer_json=path))


def test_other_tokenizer_json_models_are_refused_by_name(tmp_path: Path) -> None:
    path = saved(tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), tmp_path)
    with pytest.raises(UnsupportedError, match="WordPiece"):
        Tokenizer.from_vocabulary(Vocabulary("hf", tokenizer_json=path))


def test_other_decoders_are_refused_by_name(tmp_path: Path) -> None:
    library = byte_level()
    library.decoder = decoders.CTC()
    with pytest.raises(UnsupportedError, match="CTC"):
        Tokenizer.from_vocabulary(Vocabulary("hf", tokenizer_json=saved(library, tmp_path)))


# -- public bug reports, with Qwen's vocabulary ------------------------------------------------------------------------

REPORTED = {
    # clean-up that eats spaces
    "a != b": "64 961 293",
    "the 'quiet' room": "1782 364 43650 6 3054",
    "stop ! now": "9495 753 1431",
    " ...then": "2503 3391",
    # GPT-2's split used for Qwen
    "p->q": "79 405 80",
    "f(n):\n": "69 1445 982",
    "90210": "24 15 17 16 15",
    "2031-12-05": "17 15 18 16 12 16 17 12 15 20",
    "WE'VE it'Ll can't": "12457 6 4491 432 91426 75 646 944",
    "  \n\n  y": "18611 220 379",
    "u==v;//no\n\n": "84 418 85 9361 2152 271",
    "isn’t": "285 77 1405",
    "٥٦": "149 98 149 99",
    # the space in front of a word
    "The cat sat": "785 8251 7578",
    "  two": "220 1378",
    # characters over several tokens
    "各位龘好": "104280 82912 246 52801",
    " hi🫠!": "15588 9284 104 254 0",
}


@pytest.mark.parametrize("text", REPORTED)
def test_reported_ids(text: str, qwen: Tokenizer) -> None:
    ids = [int(i) for i in REPORTED[text].split()]
    assert qwen.encode(text) == ids
    assert qwen.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["I 'm", "f( a , b )", "def f():\n    return 1  \n        # x \n\n", " a . b ? c ! 's n't "]
)
def test_decoding_is_the_inverse_of_encoding(text: str, qwen: Tokenizer, smollm: Tokenizer) -> None:
    for tokenizer in (qwen, smollm):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("char", ["a", "_", "汉", " "])
def test_long_runs_take_linear_time(char: str, qwen: Tokenizer) -> None:
    qwen.prepare()
    seconds = {}
    for n in (25_000, 50_000):
        start = time.thread_time()
        ids = qwen.encode(char * n)
        seconds[n] = time.thread_time() - start
        assert qwen.decode(ids) == char * n
    assert seconds[50_000] < 2.0
    assert seconds[50_000] < 3 * seconds[25_000] + 0.1


def test_a_part_of_the_vocabulary_gives_the_ids_of_all_of_it(qwen: Tokenizer, smollm: Tokenizer) -> None:
    texts = ["", "a", "hello world", "def f(x):\n    return x ** 2\n", "我爱北京天安门", "e\u0301  \t\r\n 1234"]
    pick = random.Random(5)
    scripts = (range(32, 127), range(0x4E00, 0x9FFF), range(1, 0xD7FF))
    texts += ["".join(chr(pick.choice(pick.choice(scripts))) for _ in range(pick.randrange(40))) for _ in range(60)]
    for whole in (qwen, smollm):
        whole.prepare()
        for start in range(0, len(texts), 5):  # several texts each, so that a part grows and is kept
            part = Tokenizer.from_vocabulary(whole._vocabulary)
            for text in texts[start : start + 5]:
                assert part.encode(text, special=True) == whole.encode(text, special=True)
                assert part._library is not None
                assert part._library.get_vocab_size() < 40_000
        for text in texts:  # in the end it is given everything
            assert part.encode(text) == whole.encode(text)
        assert part._pairs.all()


def test_ids_beyond_the_tokenizer(qwen: Tokenizer) -> None:
    for token_id in (151_665, 151_800, 151_935, 151_936, 10**9, -1):
        assert qwen.token_bytes(token_id) == b""
        assert qwen.token_text(token_id) == ""
        assert not qwen.is_special(token_id)
    assert qwen.decode([13_048, 151_800, 0]) == "Hi!"


def test_smollm_has_its_own_split(smollm: Tokenizer) -> None:
    assert smollm.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm.encode("<|im_start|>a<|im_end|>", special=True) == [1, *smollm.encode("a"), 2]


def test_tool_calls_are_no_control_tokens(qwen: Tokenizer) -> None:
    assert qwen.encode("<tool_call>") == [151_657]
    assert not qwen.is_special(151_657)
    assert json.loads(qwen.decode([151_657, *qwen.encode('{"a": 1}'), 151_658], skip_special=True)[11:-12]) == {"a": 1}
