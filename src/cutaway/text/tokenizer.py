"""Text to token ids and back.

Holds `Vocabulary`, what a model's files say about their tokens, and `Tokenizer`, which computes with it (the merging
itself is done by the `tokenizers` library). It opens no model file but a tokenizer.json, and knows no message and no
template. Read next: `chat.py`, which turns messages into ids; `detokenizer.py`, which turns ids into text as they
stream.

Three decisions, and why:

- **Control tokens typed by a user stay text.** The library is never taught a control token's own text, only an alias
  of it that nobody can type (it holds a random number). `encode(special=True)` writes the aliases into the text first.
- **NFC where the file asks for it.** A tokenizer.json says whether text is normalised, and is obeyed (Qwen2's says
  NFC). A GGUF file has no word for it, so its text is taken as it is, which is also what llama.cpp does: encoding a
  GGUF vocabulary loses no byte. Text that is in NFC already, nearly all there is, gives the same ids from both.
- **Only what a text can need.** Decoding needs no merges, and a merge can apply to a text only where its bytes stand
  in it side by side. So of a GGUF vocabulary, the library is given the tokens and merges whose neighbouring bytes all
  occur as neighbours in the texts seen so far: the same ids as from all of them, a tenth of the time and the memory.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cutaway.errors import FormatError, RequestError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer", "Vocabulary"]


@dataclass(frozen=True)
class Vocabulary:
    """What a model's files say about their tokens: the lists of a GGUF file, or a Hugging Face tokenizer.json.

    `token_types` are GGUF's: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    `merges` are pairs "left right" in order of rank; `pre` names the rule that splits text before merging, `model`
    the kind of vocabulary (GGUF's `tokenizer.ggml.model`).
    """

    kind: Literal["gguf", "hf"]
    tokens: Sequence[str] = ()
    token_types: Sequence[int] | np.ndarray | None = None
    merges: Sequence[str] = ()
    pre: str = ""
    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False
    tokenizer_json: Path | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt2"


_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_MAX_PARTS = 8  # times the library is built from a part of the vocabulary before it is given all of it


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters that stand for bytes in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, are written as the characters from U+0100 on.
    Source: GPT-2's vocabulary.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_LETTERS = [char.encode() for char, _ in sorted(_ALPHABET.items(), key=lambda item: item[1])]  # by byte


def _bytes_of(token: str) -> bytes:
    """The bytes a token of a byte-level vocabulary stands for."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # not written in the alphabet: the text itself
        return token.encode()


# How text is split before merging, by the names of `tokenizer.ggml.pre`. No token ever crosses a split.
# The modern rule: contractions; letters with one leading mark; digits (one by one, or up to three); runs of symbols
# with the line ends after them; line ends; other white space, its last character kept for the word that follows.
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), "qwen2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama-bpe"),
    **dict.fromkeys(("smollm", "starcoder", "refact"), "smollm"),
    **dict.fromkeys(("gpt-2", "gpt2"), "gpt-2"),
}


class Tokenizer:
    """Text to ids and ids to text, for one vocabulary. Safe to share between threads.

    `bos_id`; `eos_ids`, the vocabulary's own (`Checkpoint.eos_ids` unites all sources); `add_bos`, whether a raw
    prompt should start with `bos_id` (`encode` adds nothing by itself); `vocab_size` (ids below it may have a token);
    `dummy_prefix`: decoded text loses one leading space, which a SentencePiece-style vocabulary puts before every text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._library: tokenizers.Tokenizer | None = None
        self._pairs = np.zeros((256, 256), np.bool_)  # [first, second]: the library knows what these neighbours make
        self._parts = 0
        self._nonce = secrets.token_hex(8)
        self._real_ids: dict[int, int] = {}  # the library's id of an alias -> the token's own
        self._bytes: dict[int, bytes] = {}
        self._types: np.ndarray | None = None  # of a GGUF vocabulary
        self._steps: frozenset[str] = frozenset({"ByteLevel"})  # how the file says tokens become text
        self._metaspace = ""
        self.dummy_prefix = False
        self.bos_id, self.add_bos = vocabulary.bos_id, vocabulary.add_bos
        if vocabulary.kind == "hf" and vocabulary.tokenizer_json is not None:
            self._open_hf(vocabulary, vocabulary.tokenizer_json)
        else:
            self._open_gguf(vocabulary)
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.eos_ids = frozenset(i for i in (vocabulary.eos_id, self._named("eos_token")) if i is not None)

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> Tokenizer:
        """A tokenizer for this vocabulary.

        Raises: UnsupportedError (a kind, split or decoder not implemented, by its name), FormatError.
        """
        return cls(vocabulary)

    # -- text to ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, special: bool = False, shield: str = "") -> list[int]:
        """Token ids of `text`; nothing is added before or after.

        With `special` the text of a control token becomes its id, else it stays text. A control token's text with
        `shield` after its first character stays text even then, and every `shield` is taken out: so a caller marks
        foreign text.
        A byte that no token stands for is left out, as `tokenizers` does (SmolLM2 has none for a few control codes).
        Raises: RequestError, where the text is not valid Unicode, or the model came without a tokenizer.
        """
        if not self.vocab_size:
            raise RequestError("the model's files hold no tokenizer", hint="give token ids")
        if special:

            def alias(match: re.Match[str]) -> str:
                shielded = shield and text.startswith(shield, match.end())  # a token of one character
                return match.group() if shielded else self._alias(self._control[match.group()])

            text = self._control_pattern.sub(alias, text)
        if shield:
            text = text.replace(shield, "")
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise RequestError("text is not valid Unicode", found="half of a surrogate pair") from None
        ids: list[int] = self._library_for(data).encode(text, add_special_tokens=False).ids
        return [self._real_ids.get(i, i) for i in ids] if special and self._real_ids else ids

    def prepare(self) -> tokenizers.Tokenizer:
        """Give the library the whole vocabulary now (151,387 merges: 0.35 s and 70 MB), not as texts need it."""
        with self._lock:
            return self._knowing(slice(None))

    def _library_for(self, data: bytes) -> tokenizers.Tokenizer:
        """The library with all that this text can need."""
        if self._types is None or self._pairs.all():
            return self.prepare()
        letters = np.frombuffer(b"".join([_LETTERS[byte] for byte in data]), np.uint8)
        with self._lock:
            return self._knowing((letters[:-1], letters[1:]))

    def _knowing(self, where: slice | tuple[np.ndarray, np.ndarray]) -> tokenizers.Tokenizer:
        """The library, built again if it does not know these neighbours. An error leaves it as it was."""
        if self._types is not None and (self._library is None or not self._pairs[where].all()):
            pairs = self._pairs.copy()
            pairs[where if self._parts < _MAX_PARTS else slice(None)] = True
            self._library = self._build_gguf(pairs)
            self._pairs, self._parts = pairs, self._parts + 1
        assert self._library is not None  # a tokenizer.json was read whole when it was opened
        return self._library

    @property
    def control_tokens(self) -> dict[str, int]:
        """Text of each control token -> id."""
        return self._control

    # -- ids to text -------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`: their bytes joined, then read as UTF-8. No clean-up.

        Bytes that are not UTF-8 become U+FFFD. An id without a token adds nothing. See `dummy_prefix`.
        """
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self.dummy_prefix and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for any id that has none (a model may have more rows than tokens)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id) if 0 <= token_id < self.vocab_size else b""
        return known

    def token_text(self, token_id: int) -> str:
        r"""One token for people to read: its text, with bytes that are no whole character as `\xNN`."""
        return self.token_bytes(token_id).decode("utf-8", errors="backslashreplace")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which is never part of an answer's text."""
        return token_id in self._control_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and the like -> text, as chat templates name them."""
        named = {"bos_token": self._vocabulary.bos_id, "eos_token": self._vocabulary.eos_id}
        texts = {name: self.token_text(i) for name, i in named.items() if i is not None}
        config = self._vocabulary.tokenizer_config
        return texts | {name: text for name in config if name.endswith("_token") and (text := _content(config[name]))}

    # -- GGUF --------------------------------------------------------------------------------------------------------

    def _open_gguf(self, vocabulary: Vocabulary) -> None:
        if vocabulary.model != "gpt2":
            raise UnsupportedError("vocabulary kind", found=vocabulary.model, expected="gpt2 (byte-level BPE)")
        if len(vocabulary.tokens) and vocabulary.pre not in _SPLITS:
            found = vocabulary.pre or "no tokenizer.ggml.pre"
            raise UnsupportedError("pre-tokenizer", found=found, expected="one of " + ", ".join(_SPLITS))
        tokens = vocabulary.tokens
        self.vocab_size = len(tokens)
        given = vocabulary.token_types
        self._types = np.ones(len(tokens), np.int32) if given is None else np.asarray(given, np.int32)
        if len(self._types) != len(tokens):
            raise FormatError("token types", found=len(self._types), expected=f"{len(tokens)}, one a token")
        self._control = {tokens[i]: i for i in self._ids_of_type(_CONTROL, _UNKNOWN) if tokens[i]}
        self._control_ids = frozenset(self._control.values())

    def _ids_of_type(self, *types: int) -> list[int]:
        assert self._types is not None
        return [int(i) for i in np.flatnonzero(np.isin(self._types, types))]

    def _build_gguf(self, known: np.ndarray) -> tokenizers.Tokenizer:
        from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

        tokens, merges = self._vocabulary.tokens, self._vocabulary.merges
        assert self._types is not None
        added = {i: tokens[i] for i in self._ids_of_type(_USER_DEFINED)}
        added |= {i: self._alias(i) for i in self._control_ids}
        normal = ~np.isin(self._types, (_CONTROL, _UNKNOWN, _USER_DEFINED, _UNUSED))
        kept = np.flatnonzero(normal & _possible(tokens, known)).tolist()
        ids = {tokens[i]: i for i in kept} | {text: i for i, text in added.items()}
        if len(ids) != len(kept) + len(added):
            raise FormatError("vocabulary", found=f"{len(kept) + len(added) - len(ids)} tokens that appear twice")
        split = _SPLITS[self._vocabulary.pre]
        try:
            possible = np.flatnonzero(_possible(merges, known, joined=True)).tolist()
            pairs = [merges[i].partition(" ")[::2] for i in possible]
            # Llama 3 takes a whole word that is a token as it is, whatever its merges would make of it
            library = Tokenizer(models.BPE(ids, pairs, ignore_merges=split == "llama-bpe"))
        except Exception as error:
            raise FormatError("merges do not fit the vocabulary", found=error) from None
        if split in ("qwen2", "llama-bpe"):
            pattern = _MODERN.replace("DIGITS", "" if split == "qwen2" else "{1,3}")
            first: Any = pre_tokenizers.Split(Regex(pattern), "isolated")
            rules = [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        else:  # GPT-2's own split, before which SmolLM takes digits one by one
            rules = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            if split == "smollm":
                rules.insert(0, pre_tokenizers.Digits(individual_digits=True))
        library.pre_tokenizer = pre_tokenizers.Sequence(rules)
        library.add_tokens([AddedToken(text, normalized=False) for text in added.values() if text])
        return library

    # -- Hugging Face ------------------------------------------------------------------------------------------------

    def _open_hf(self, vocabulary: Vocabulary, path: Path) -> None:
        self._library = library = _read_json(path)
        added = library.get_added_tokens_decoder()
        self.vocab_size = max(library.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._added = {i: token.content for i, token in added.items()}
        specials = {i: token for i, token in added.items() if token.special and token.content}
        self._control = {token.content: i for i, token in specials.items()}
        self._control_ids = frozenset(specials)
        self._read_decoder(library)
        if self.bos_id is None:
            self.bos_id = self._named("bos_token")
        if self.bos_id is not None and self.bos_id in library.encode("").ids:
            self.add_bos = True
        library.encode_special_tokens = True  # typed control tokens stay text; the aliases are no specials to it
        self._add_aliases(library, specials)

    def _read_decoder(self, library: tokenizers.Tokenizer) -> None:
        """How tokens become text: bytes in the GPT-2 alphabet, or SentencePiece's mark in the place of spaces."""
        root: Any = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {"type": "none"}
        steps = root["decoders"] if root["type"] == "Sequence" else [root]
        self._steps = frozenset(step["type"] for step in steps)
        unknown = self._steps - {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
        if unknown:
            raise UnsupportedError("tokenizer.json decoder", found=", ".join(sorted(unknown)))
        for step in steps:
            if step["type"] == "Metaspace":
                self._metaspace = step["replacement"]
                self.dummy_prefix = step.get("prepend_scheme", "always") != "never"
            elif step["type"] == "Replace" and step["content"] == " ":
                self._metaspace = step["pattern"].get("String", "")
            elif step["type"] == "Strip" and step["content"] == " ":
                self.dummy_prefix = step["start"] > 0

    def _add_aliases(self, library: tokenizers.Tokenizer, specials: dict[int, Any]) -> None:
        from tokenizers import AddedToken

        def added(i: int, token: Any) -> AddedToken:
            habits = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
            return AddedToken(self._alias(i), normalized=False, **habits)

        library.add_tokens([added(i, token) for i, token in specials.items()])
        self._real_ids = {known: i for i in specials if (known := library.token_to_id(self._alias(i))) is not None}
        if min(self._real_ids, default=self.vocab_size) < self.vocab_size:
            raise FormatError("tokenizer.json", found="token ids with gaps")

    # -- both --------------------------------------------------------------------------------------------------------

    def _alias(self, token_id: int) -> str:
        """A name for a control token that no text can hold by chance or by guessing."""
        return f"\ue000{self._nonce}:{token_id}\ue001"

    def _named(self, name: str) -> int | None:
        """The id of the token that tokenizer_config.json names so."""
        text = _content(self._vocabulary.tokenizer_config.get(name))
        return self._control.get(text) if text else None

    def _find_bytes(self, token_id: int) -> bytes:
        kind = 0
        if self._types is not None:
            token, kind = self._vocabulary.tokens[token_id], int(self._types[token_id])
            if kind == _UNUSED:
                return b""
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
                return token.encode()
        else:
            assert self._library is not None
            if token_id in self._added:
                return self._added[token_id].encode()
            token = self._library.id_to_token(token_id) or ""
        if (kind == _BYTE or "ByteFallback" in self._steps) and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if "ByteLevel" in self._steps:
            return _bytes_of(token)
        return (token.replace(self._metaspace, " ") if self._metaspace else token).encode()


def _possible(strings: Sequence[str], pairs: np.ndarray, joined: bool = False) -> np.ndarray:
    """Which of the strings have only neighbours that are in `pairs` [256, 256], bool [len(strings)].

    `joined`: they are merges "left right", and the bytes on both sides of the space are neighbours.
    """
    data, begins, ends = _flat(strings)
    possible = np.ones(len(strings), np.bool_)
    rows = np.flatnonzero(ends - begins > 1)  # those still looked at, and where in the data
    at = begins[rows]
    while len(rows):
        first, second = data[at], data[at + 1]
        if joined:
            space = second == ord(" ")
            second[space] = data[np.minimum(at[space] + 2, len(data) - 1)]
            known = pairs[first, second] | (first == ord(" "))
        else:
            known = pairs[first, second]
        possible[rows[~known]] = False
        more = known & (at + 2 < ends[rows])
        rows, at = rows[more], at[more] + 1
    return possible


def _flat(strings: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """UTF-8 bytes that hold all the strings, uint8, and where each begins and ends in them."""
    if isinstance(getattr(strings, "data", None), np.ndarray):  # they lie in a file
        return strings.data, strings.begins, strings.ends
    coded = [text.encode() for text in strings]
    ends = np.cumsum([len(text) for text in coded], dtype=np.int64)
    begins = ends - np.array([len(text) for text in coded], np.int64)
    return np.frombuffer(b"".join(coded), np.uint8), begins, ends


def _content(token: Any) -> str | None:
    """tokenizer_config.json writes a token as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models

    try:
        library = Tokenizer.from_file(str(path))
        library.no_truncation()
        library.no_padding()
    except Exception as error:
        raise FormatError(f"{path} is not a tokenizer", found=error) from None
    if not isinstance(library.model, models.BPE):
        raise UnsupportedError("tokenizer.json model", found=type(library.model).__name__, expected="BPE")
    return library
