"""text/detokenizer.py: what may be shown, and when."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.errors import RequestError
from cutaway.text.detokenizer import Detokenizer
from cutaway.text.tokenizer import Tokenizer, Vocabulary


def scripted(pieces: Sequence[bytes | str]) -> Tokenizer:
    """A tokenizer whose token i is `pieces[i]`, written as <0xNN> or as user-defined text."""
    tokenizer = Tokenizer.from_vocabulary(Vocabulary("gguf"))
    tokenizer._bytes = {i: piece.encode() if isinstance(piece, str) else piece for i, piece in enumerate(pieces)}
    return tokenizer


def stream(pieces: Sequence[bytes | str], stop: Sequence[str] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(scripted(pieces), stop)
    shown = []
    for i in range(len(pieces)):
        shown.append(detokenizer.push(i))
        if detokenizer.stopped:
            break
    return [*shown, detokenizer.finish()], detokenizer


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "tokens", "match"),
    [
        ("Hello |EN|D| more", ["END"], "Hello ", 3, "END"),
        ("a|\nQ|: b", ["\nQ:"], "a", 3, "\nQ:"),
        ("xENDy", ["END"], "x", 1, "END"),
        ("one two three", ["three", "two"], "one ", 1, "two"),
        ("aab|aac", ["aaac"], "aabaac", 2, None),
        ("aa|ab", ["aab"], "a", 2, "aab"),
        ("x|ab|ab|ac", ["ababac"], "x", 4, "ababac"),
        ("EN", ["END"], "EN", 1, None),
        ("ab|cd", ["bcd", "cd"], "a", 2, "bcd"),
        ("ab|cdef", ["abcdef", "cd"], "ab", 2, "cd"),
        ("汉|字|!", ["字!"], "汉", 3, "字!"),
    ],
)
def test_stop_strings(pieces: str, stop: list[str], shown: str, tokens: int, match: str | None) -> None:
    given_out, detokenizer = stream(pieces.split("|"), stop)
    assert "".join(given_out) == shown
    assert len(given_out) - 1 == tokens, "generation ends with the token that completes the match"
    assert detokenizer.stop_match == match
    assert detokenizer.stopped == (match is not None)


def test_nothing_follows_a_stop() -> None:
    _, detokenizer = stream(["END", "more"], ["END"])
    assert detokenizer.push(1) + detokenizer.finish() == ""


def test_only_what_may_become_a_stop_string_is_held() -> None:
    assert stream(["say E", "N", "X", " E"], ["END"])[0] == ["say ", "", "ENX", " ", "E"]


@pytest.mark.parametrize("stop", [[""], ["a", ""], [1], [None]])
def test_stop_strings_are_checked(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="stop") as caught:
        Detokenizer(scripted([]), stop)
    assert caught.value.param == "stop"


def test_one_stop_string_need_not_be_in_a_list() -> None:
    assert "".join(stream(["to be"], "be")[0]) == "to "


def test_broken_bytes_are_shown_once_that_is_certain() -> None:
    assert stream([b"\xe6", b"\xb1", b"\x89"])[0] == ["", "", "汉", ""]
    assert stream([b"\xe6", b"\xb1", b"a"])[0] == ["", "", "�a", ""]
    assert stream([b"\xe6\xb1"])[0] == ["", "�"]
    assert stream([b"\xff", b"a"])[0] == ["�", "a", ""]


@st.composite
def bytes_in_pieces(draw: st.DrawFn) -> list[bytes]:
    data = draw(st.one_of(st.binary(max_size=40), st.text("aÉ汉🫠EN", max_size=20).map(str.encode)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(bytes_in_pieces())
def test_stream_equals_whole(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)[0]) == b"".join(pieces).decode("utf-8", errors="replace")


@given(bytes_in_pieces(), st.lists(st.text("aÉ汉EN", min_size=1, max_size=4), max_size=4))
def test_the_first_stop_to_complete_ends_the_text_however_it_is_cut(pieces: list[bytes], stops: list[str]) -> None:
    text = b"".join(pieces).decode("utf-8", errors="replace")
    found = [(text.index(s) + len(s), -len(s)) for s in stops if s in text]
    expected = text[: min(found)[0] + min(found)[1]] if found else text
    given_out, detokenizer = stream(pieces, stops)
    assert "".join(given_out) == expected
    assert detokenizer.stopped == bool(found)


@given(bytes_in_pieces(), st.text("aÉ汉EN", min_size=1, max_size=4))
def test_what_was_shown_never_has_to_be_taken_back(pieces: list[bytes], stop: str) -> None:
    given_out, detokenizer = stream(pieces, [stop])
    shown = ""
    for piece in given_out[: -2 if detokenizer.stopped else -1]:
        shown += piece
        assert not any(shown.endswith(stop[:n]) for n in range(1, len(stop))), "a stop string had begun"


def test_time_is_linear() -> None:
    detokenizer = Detokenizer(scripted(["aaaa"]), ["a" * 1000 + "b", "ab" * 500])
    start = time.thread_time()
    text = "".join(detokenizer.push(0) for _ in range(10_000)) + detokenizer.finish()
    assert text == "a" * 40_000
    assert time.thread_time() - start < 2.0


# -- public bug reports, with Qwen's vocabulary ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([104280, 82912, 246, 52801], "各位龘好"),
        ([15588, 9284, 104, 254, 0], " hi🫠!"),
        ([785, 8251, 7578], "The cat sat"),
        ([220, 1378], "  two"),
    ],
)
def test_characters_over_several_tokens(ids: list[int], text: str, qwen: Tokenizer) -> None:
    detokenizer = Detokenizer(qwen)
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert "".join(pieces) == text == qwen.decode(ids)
    assert not any("�" in piece for piece in pieces)


def test_control_tokens_and_empty_rows_are_not_shown(qwen: Tokenizer) -> None:
    ids = [6023, 151645, 151800]
    hidden, shown = Detokenizer(qwen), Detokenizer(qwen, skip_special=False)
    assert "".join(map(hidden.push, ids)) == "hi"
    assert "".join(map(shown.push, ids)) == "hi<|im_end|>"


def test_sentencepiece_space_is_removed_once() -> None:
    tokenizer = scripted([" The", " cat", " sat"])
    tokenizer.dummy_prefix = True
    detokenizer = Detokenizer(tokenizer)
    assert [*map(detokenizer.push, range(3))] == ["The", " cat", " sat"]
