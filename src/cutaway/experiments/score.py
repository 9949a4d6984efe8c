"""How well the model expected a given text: log-probability and rank of each token, perplexity, bits per byte.

Asks the model for logits at every position and reads off the tokens that are really there; samples nothing. Read
next: `compare.py`, which puts two models side by side on the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from cutaway.errors import RequestError
from cutaway.experiments.distributions import token_statistics
from cutaway.experiments.passes import prompt_ids, token_bytes, token_texts

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Perplexity", "Score", "TokenScore", "Window", "perplexity", "score", "windows"]

Rule = Literal["sliding", "llama.cpp"]


@dataclass(frozen=True)
class TokenScore:
    """One token of the text. `logprob` (nats) and `rank` (1 = most probable) are None where nothing comes before it.

    `entropy` is that of the distribution the token was judged by; `best` and `best_logprob` what the model would
    have put there.
    """

    id: int
    text: str
    nbytes: int
    logprob: float | None = None
    rank: int | None = None
    entropy: float | None = None
    best: int | None = None
    best_text: str | None = None
    best_logprob: float | None = None


@dataclass(frozen=True)
class Score:
    """A text token by token. Sums leave out the tokens that could not be judged (the first, without a BOS token)."""

    model: str
    text: str
    tokens: tuple[TokenScore, ...]

    @property
    def judged(self) -> tuple[TokenScore, ...]:
        return tuple(token for token in self.tokens if token.logprob is not None)

    @property
    def logprob(self) -> float:
        """Log-probability of the judged tokens together, in nats."""
        return math.fsum(token.logprob for token in self.tokens if token.logprob is not None)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / len(self.judged)) if self.judged else math.nan

    @property
    def bits_per_byte(self) -> float:
        nbytes = sum(token.nbytes for token in self.judged)
        return -self.logprob / math.log(2) / nbytes if nbytes else math.nan


def score(llm: LLM, text: str | Sequence[int]) -> Score:
    """Log-probability and rank of each token of `text`, given all tokens before it.

    The text is taken as it is (no chat template); a BOS token is put before it where the model's files ask for one.
    Raises: ContextLengthError if the text is longer than the context.
    """
    ids = prompt_ids(llm, text, "text")
    pieces, sizes = token_texts(llm, ids), [len(piece) for piece in token_bytes(llm, ids)]
    tokens = [TokenScore(*token) for token in zip(ids, pieces, sizes, strict=True)]
    if len(ids) > 1:
        found = token_statistics(llm.forward(ids)[:-1], np.array(ids[1:]))
        for row, best_text in enumerate(token_texts(llm, found.best)):
            tokens[row + 1] = TokenScore(
                ids[row + 1],
                pieces[row + 1],
                sizes[row + 1],
                float(found.logprob[row]),
                int(found.rank[row]),
                float(found.entropy[row]),
                int(found.best[row]),
                best_text,
                float(found.best_logprob[row]),
            )
    return Score(llm.name, text if isinstance(text, str) else llm.detokenize(ids), tuple(tokens))


@dataclass(frozen=True)
class Window:
    """One forward pass of a perplexity: tokens `start:end` are read, of which `judged:end` count."""

    start: int
    judged: int
    end: int


def windows(num_tokens: int, window: int, stride: int, rule: Rule = "sliding") -> list[Window]:
    """The forward passes that judge a text longer than one of them.

    sliding    Windows of `window` tokens start every `stride` tokens. Each judges the tokens no window before it has
               judged: the first one all but its first token, the others their last `stride` tokens, which so have at
               least `window - stride` tokens before them. Every token but the first counts exactly once. A smaller
               stride costs more passes and gives a lower, truer perplexity.
    llama.cpp  Windows of `window` tokens lie end to end; of each only the second half is judged, and what is left
               over at the end of the text is not read: the rule of llama-perplexity, for numbers that compare with it.
    """
    if window < 2:
        raise RequestError("window", found=window, expected="at least 2 tokens", param="window")
    if not 1 <= stride <= window - 1:
        raise RequestError("stride", found=stride, expected=f"1 to window - 1 = {window - 1}", param="stride")
    if rule == "llama.cpp":
        # llama-perplexity judges the tokens that follow positions window/2 to window - 2
        return [Window(s, s + window // 2 + 1, s + window) for s in range(0, num_tokens - window + 1, window)]
    if rule != "sliding":
        raise RequestError("rule", found=repr(rule), expected="'sliding' or 'llama.cpp'", param="rule")
    found, done = [], 1
    for start in range(0, num_tokens, stride):
        end = min(start + window, num_tokens)
        if end > done:
            found.append(Window(start, done, end))
            done = end
        if end == num_tokens:
            break
    return found


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text. `ppl` = exp(mean negative log-likelihood), `ppl_error` one standard error of it."""

    model: str
    rule: Rule
    window: int
    stride: int
    num_tokens: int
    judged_tokens: int
    judged_bytes: int
    nll: float  # nats, summed
    ppl: float
    ppl_error: float
    bits_per_byte: float
    running: tuple[float, ...]  # the perplexity of all windows so far, after each window


def perplexity(
    llm: LLM,
    text: str | Sequence[int],
    window: int = 512,
    stride: int | None = None,
    *,
    rule: Rule = "sliding",
    chunks: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """Perplexity of a text of any length; see `windows` for which token is judged with what before it.

    `stride` defaults to half the window. `chunks` stops after that many windows. `progress` is called after each
    window with (windows done, windows in all, perplexity so far). With rule "llama.cpp", a model whose files ask for
    a BOS token gets one in place of each window's first token, as there.
    Formulas: PPL = exp(NLL / judged tokens); error = PPL * sqrt(variance of the token NLL / (judged - 1));
    bits per byte = NLL / ln 2 / UTF-8 bytes of the judged tokens.
    Raises: RequestError if the text has no token to judge, or the window is larger than the context.
    """
    ids = list(llm.tokenize(text)) if isinstance(text, str) else [int(i) for i in text]
    stride = max(1, window // 2) if stride is None else stride
    if window > llm.max_context:
        raise RequestError("window", found=window, expected=f"at most the context, {llm.max_context}", param="window")
    plan = windows(len(ids), window, stride, rule)[:chunks]
    if not plan:
        need = window if rule == "llama.cpp" else 2
        raise RequestError("the text is too short", found=f"{len(ids)} tokens", expected=f"at least {need}")
    losses: list[np.ndarray] = []
    running: list[float] = []
    nbytes = 0
    for done, part in enumerate(plan, start=1):
        read = list(ids[part.start : part.end])
        if rule == "llama.cpp" and llm.checkpoint.add_bos and llm.checkpoint.bos_id is not None:
            read[0] = llm.checkpoint.bos_id
        logits = llm.forward(read)[part.judged - 1 - part.start : -1]
        judged = ids[part.judged : part.end]
        losses.append(-token_statistics(logits, np.array(judged)).logprob)
        nbytes += sum(len(piece) for piece in token_bytes(llm, judged))
        running.append(math.exp(float(np.mean(np.concatenate(losses)))))
        if progress is not None:
            progress(done, len(plan), running[-1])
    nll = np.concatenate(losses)
    variance = float(np.var(nll))
    return Perplexity(
        model=llm.name,
        rule=rule,
        window=window,
        stride=stride if rule == "sliding" else window,
        num_tokens=len(ids),
        judged_tokens=len(nll),
        judged_bytes=nbytes,
        nll=float(nll.sum()),
        ppl=running[-1],
        ppl_error=running[-1] * math.sqrt(variance / (len(nll) - 1)) if len(nll) > 1 else math.nan,
        bits_per_byte=float(nll.sum()) / math.log(2) / nbytes if nbytes else math.nan,
        running=tuple(running),
    )
