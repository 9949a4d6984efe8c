"""score and perplexity: which token is judged by what, and the sums made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_llm import FakeLLM

from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.distributions import log_softmax
from cutaway.experiments.score import Window, perplexity, score, windows

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


def test_score_reads_each_token_after_all_before_it(llm: FakeLLM) -> None:
    found = score(llm, TEXT)
    ids = llm.tokenize(TEXT)
    assert [token.text for token in found.tokens] == list(TEXT)
    assert found.tokens[0].logprob is None
    for at in (1, 7, len(ids) - 1):  # by a forward pass over just what comes before
        row = log_softmax(llm.forward(ids[:at]))[-1]
        token = found.tokens[at]
        assert token.logprob == pytest.approx(row[ids[at]], abs=1e-4)
        assert token.rank == 1 + (row > row[ids[at]]).sum()
        assert token.best == row.argmax()
        assert token.best_text == chr(30 + int(row.argmax()))
    assert found.logprob == pytest.approx(sum(t.logprob for t in found.tokens[1:]))
    assert found.perplexity == pytest.approx(math.exp(-found.logprob / (len(ids) - 1)))
    assert found.bits_per_byte == pytest.approx(-found.logprob / math.log(2) / (len(ids) - 1))


def test_score_of_one_token_judges_nothing(llm: FakeLLM) -> None:
    found = score(llm, "T")
    assert len(found.tokens) == 1
    assert found.judged == ()
    assert math.isnan(found.perplexity)


def test_score_refuses(llm: FakeLLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        score(llm, "")
    with pytest.raises(ContextLengthError, match="257 tokens, expected at most 256"):
        score(llm, "a" * 257)
    with pytest.raises(RequestError, match="found 97, expected 0 to 96"):
        score(llm, [3, 97])


def test_sliding_windows_judge_every_token_but_the_first_once() -> None:
    for num_tokens in range(2, 40):
        for window, stride in ((8, 4), (8, 1), (8, 7), (5, 3), (2, 1)):
            plan = windows(num_tokens, window, stride)
            judged = [i for part in plan for i in range(part.judged, part.end)]
            assert judged == list(range(1, num_tokens)), (num_tokens, window, stride)
            for part in plan:
                assert 2 <= part.end - part.start <= window
                assert part.start == 0 or part.judged - part.start >= window - stride


def test_llama_cpp_windows() -> None:
    # 20 tokens in windows of 8: two of them, tokens 5 to 7 of each judged, the last four tokens not read.
    assert windows(20, 8, 4, "llama.cpp") == [Window(0, 5, 8), Window(8, 13, 16)]
    assert windows(7, 8, 4, "llama.cpp") == []


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 0), (8, 8), (8, -1)])
def test_windows_refuse(window: int, stride: int) -> None:
    with pytest.raises(RequestError):
        windows(20, window, stride)


def test_one_window_is_the_score(llm: FakeLLM) -> None:
    whole = perplexity(llm, TEXT, window=64)
    assert whole.nll == pytest.approx(-score(llm, TEXT).logprob)
    assert whole.ppl == pytest.approx(score(llm, TEXT).perplexity)
    assert whole.judged_tokens == len(TEXT) - 1 == whole.judged_bytes


def test_perplexity_by_hand(llm: FakeLLM) -> None:
    ids = llm.tokenize(TEXT)
    losses = []
    for part in windows(len(ids), 8, 4):
        for at in range(part.judged, part.end):
            losses.append(-log_softmax(llm.forward(ids[part.start : at]))[-1][ids[at]])
    found = perplexity(llm, TEXT, window=8, stride=4)
    assert found.ppl == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert found.ppl_error == pytest.approx(found.ppl * np.std(losses) / math.sqrt(len(losses) - 1), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / len(losses), rel=1e-4)
    assert found.running[-1] == found.ppl
    assert len(found.running) == len(windows(len(ids), 8, 4))


def test_llama_cpp_rule_puts_bos_in_place_of_the_first_token(llm: FakeLLM) -> None:
    with_bos = FakeLLM()
    with_bos.checkpoint.add_bos, with_bos.checkpoint.bos_id = True, 5
    ids = with_bos.tokenize(TEXT)
    expected = [
        -log_softmax(llm.forward([5, *ids[s + 1 : at]]))[-1][ids[at]]
        for s in range(0, len(ids) - 7, 8)
        for at in (s + 5, s + 6, s + 7)
    ]
    found = perplexity(with_bos, TEXT, window=8, rule="llama.cpp")
    assert found.ppl == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert found.ppl != pytest.approx(perplexity(llm, TEXT, window=8, rule="llama.cpp").ppl, rel=1e-4)


def test_chunks_and_progress(llm: FakeLLM) -> None:
    seen: list[tuple[int, int, float]] = []
    found = perplexity(llm, TEXT, window=8, stride=4, chunks=2, progress=lambda *values: seen.append(values))
    assert [values[:2] for values in seen] == [(1, 2), (2, 2)]
    assert seen[-1][2] == found.ppl
    assert found.judged_tokens == 11  # 7 of the first window, 4 of the second


def test_perplexity_refuses(llm: FakeLLM) -> None:
    with pytest.raises(RequestError, match="at most the context, 256"):
        perplexity(llm, TEXT, window=512)
    with pytest.raises(RequestError, match="too short"):
        perplexity(llm, "a", window=8)
    with pytest.raises(RequestError, match="too short: found 7 tokens, expected at least 8"):
        perplexity(llm, "a" * 7, window=8, rule="llama.cpp")
