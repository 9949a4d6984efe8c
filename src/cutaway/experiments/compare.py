"""Two models, or one model under two conditions, on the same prompt and then on the same tokens.

First each writes its own answer. Then both are made to read both answers, so that at every position their
distributions can be put beside each other: how far apart they are, what each gives the other's token, and how likely
each was to stop. Models with different vocabularies share no tokens: of them only texts, the end of the turn on their
own answers, and bits per byte are compared, and the result says so. Read next: `score.py`, the numbers of one text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.experiments.distributions import divergences, logprobs_of, token_statistics
from cutaway.experiments.passes import answer, chat_ids, forced_logits, prompt_ids, rendered_chat, stop_ids, token_texts
from cutaway.experiments.score import Perplexity, perplexity

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = [
    "Comparison",
    "Condition",
    "Divergence",
    "Forced",
    "ForcedSide",
    "Side",
    "compare",
    "divergence_summary",
    "same_vocabulary",
    "template_end_tokens",
]

_MARK = "cutaway-marks-the-end-of-this-turn"


@dataclass(frozen=True)
class Condition:
    """A model and how it is asked: `chat` puts the prompt into the model's chat template as a user turn.

    `sampling` are the settings of the answer, by the names of SamplingParams.
    """

    llm: LLM
    label: str
    chat: bool = True
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """One condition's own answer. `prompt` is exactly what the model read; `ids` include the token it stopped at.

    `stop_tokens` are the ids that end an answer here, `template_end` those the chat template puts after a turn.
    """

    label: str
    model: str
    chat: bool
    prompt: str
    prompt_tokens: int
    text: str
    ids: tuple[int, ...]
    finish_reason: str
    stop_tokens: Mapping[int, str]
    template_end: Mapping[int, str]


@dataclass(frozen=True)
class ForcedSide:
    """What one condition thought of each token of an answer. All [tokens]; probabilities as natural logarithms."""

    logprob: np.ndarray
    rank: np.ndarray  # 1: it would have said the same
    entropy: np.ndarray  # nats
    best: tuple[int, ...]
    best_texts: tuple[str, ...]
    end_probability: np.ndarray  # P(end of turn) in place of this token


@dataclass(frozen=True)
class Forced:
    """One side's answer, read by both. `kl_ab` is KL(A || B) in nats at each token; None where vocabularies differ."""

    source: str  # label of the side that wrote it
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    a: ForcedSide | None
    b: ForcedSide | None
    kl_ab: np.ndarray | None = None
    kl_ba: np.ndarray | None = None


@dataclass(frozen=True)
class Divergence:
    """How far B's distributions lie from A's over some positions; names and units as llama-perplexity prints them.

    `delta_p` is B's probability of the token that is there, minus A's.
    """

    positions: int
    mean_kld: float
    median_kld: float
    kld_99_9: float
    max_kld: float
    same_top: float  # share of positions
    mean_delta_p: float
    rms_delta_p: float


@dataclass(frozen=True)
class Comparison:
    """Two conditions side by side. `warnings` are what the reader must not miss, `notes` what was not compared."""

    prompt: str
    a: Side
    b: Side
    same_vocabulary: bool
    same_ids: int  # tokens the two answers share from their start
    forced: tuple[Forced, ...]
    divergence: Divergence | None
    perplexity_a: Perplexity | None = None
    perplexity_b: Perplexity | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def same_vocabulary(a: LLM, b: LLM) -> bool:
    """Whether an id means the same bytes to both, and the same control token (extra ids of one are allowed)."""
    if a.tokenizer is b.tokenizer:
        return True
    shared = min(a.tokenizer.vocab_size, b.tokenizer.vocab_size)
    controls = [{t: i for t, i in m.tokenizer.control_tokens.items() if i < shared} for m in (a, b)]
    if controls[0] != controls[1] or not shared:
        return False
    return all(a.tokenizer.token_bytes(i) == b.tokenizer.token_bytes(i) for i in range(shared))


def template_end_tokens(llm: LLM) -> frozenset[int]:
    """The control token the chat template puts right after an assistant's turn; empty without a template or token."""
    if not llm.chat_template:
        return frozenset()
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    after = rendered_chat(llm, turns).rpartition(_MARK)[2]
    found = [(after.find(text), token) for text, token in llm.tokenizer.control_tokens.items() if text in after]
    return frozenset({min(found)[1]}) if found else frozenset()


def divergence_summary(logits_a: np.ndarray, logits_b: np.ndarray, ids: np.ndarray) -> Divergence:
    """Summary over positions: row i of both is the distribution that token `ids[i]` was judged by.

    Formulas: KLD = sum p_A (ln p_A - ln p_B); delta p = p_B(token) - p_A(token); RMS over positions.
    """
    left, right = token_statistics(logits_a, ids), token_statistics(logits_b, ids)
    return _summary(divergences(logits_a, logits_b), left.best == right.best, right.logprob, left.logprob)


def _summary(kld: np.ndarray, same: np.ndarray, logprob_b: np.ndarray, logprob_a: np.ndarray) -> Divergence:
    delta = np.exp(logprob_b) - np.exp(logprob_a)
    return Divergence(
        positions=len(kld),
        mean_kld=float(kld.mean()),
        median_kld=float(np.median(kld)),
        kld_99_9=float(np.percentile(kld, 99.9)),
        max_kld=float(kld.max()),
        same_top=float(same.mean()),
        mean_delta_p=float(delta.mean()),
        rms_delta_p=float(np.sqrt((delta**2).mean())),
    )


def compare(
    a: Condition,
    b: Condition,
    prompt: str,
    *,
    max_tokens: int = 64,
    text: str | None = None,
    window: int = 512,
    stride: int | None = None,
) -> Comparison:
    """Ask both conditions, then make both read both answers; with `text`, also its perplexity under both.

    Raises: RequestError and ContextLengthError as the models do; TemplateError if a template refuses the prompt.
    """
    same = same_vocabulary(a.llm, b.llm)
    prompts = [_prompt(condition, prompt) for condition in (a, b)]
    sides = [_side(c, ids, max_tokens) for c, ids in zip((a, b), prompts, strict=True)]
    forced, parts = [], []
    for side, own in zip(sides, (a, b), strict=True):
        if not side.ids:
            continue
        run, part = _forced(side, own, (a, b), prompts, same)
        forced.append(run)
        parts.append(part)
    measured = [part for part in parts if part is not None]
    found: list[Perplexity | None] = [None, None]
    if text is not None:
        found[0] = perplexity(a.llm, text, _window(a, window), stride)
        found[1] = found[0] if a.llm is b.llm else perplexity(b.llm, text, _window(b, window), stride)
    return Comparison(
        prompt=prompt,
        a=sides[0],
        b=sides[1],
        same_vocabulary=same,
        same_ids=_shared_start(sides[0].ids, sides[1].ids) if same else 0,
        forced=tuple(forced),
        divergence=_summary(*(np.concatenate(columns) for columns in zip(*measured, strict=True)))
        if measured
        else None,
        perplexity_a=found[0],
        perplexity_b=found[1],
        warnings=tuple(line for side in sides for line in _warnings(side)),
        notes=tuple(_notes(a, b, same)),
    )


def _window(condition: Condition, window: int) -> int:
    return min(window, condition.llm.max_context)


def _prompt(condition: Condition, prompt: str) -> list[int]:
    if not condition.chat:
        return prompt_ids(condition.llm, prompt)
    turns = [{"role": "system", "content": condition.system}] if condition.system is not None else []
    return prompt_ids(condition.llm, chat_ids(condition.llm, [*turns, {"role": "user", "content": prompt}]))


def _side(condition: Condition, ids: list[int], max_tokens: int) -> Side:
    llm = condition.llm
    said = answer(llm, ids, {"max_tokens": max_tokens, **condition.sampling})
    stops = sorted(stop_ids(llm) | set(condition.sampling.get("stop_token_ids", ())))
    ends = sorted(template_end_tokens(llm))
    return Side(
        label=condition.label,
        model=llm.name,
        chat=condition.chat,
        prompt="".join(token_texts(llm, ids)),
        prompt_tokens=len(ids),
        text=said.text,
        ids=tuple(said.ids),
        finish_reason=said.finish_reason,
        stop_tokens=dict(zip(stops, token_texts(llm, stops), strict=True)),
        template_end=dict(zip(ends, token_texts(llm, ends), strict=True)),
    )


_Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _forced(
    side: Side, own: Condition, both: tuple[Condition, Condition], prompts: list[list[int]], same: bool
) -> tuple[Forced, _Part | None]:
    """One answer read by both conditions (only by its own where the vocabularies differ)."""
    ids = np.array(side.ids)
    logits = [
        forced_logits(condition.llm, ids_before, side.ids) if same or condition is own else None
        for condition, ids_before in zip(both, prompts, strict=True)
    ]
    readers = [
        _read(condition.llm, rows, ids) if rows is not None else None
        for condition, rows in zip(both, logits, strict=True)
    ]
    texts = tuple(token_texts(own.llm, side.ids))
    if logits[0] is None or logits[1] is None or readers[0] is None or readers[1] is None:
        return Forced(side.label, side.ids, texts, readers[0], readers[1]), None
    kl_ab, kl_ba = divergences(logits[0], logits[1]), divergences(logits[1], logits[0])
    same_top = np.array(readers[0].best) == np.array(readers[1].best)
    run = Forced(side.label, side.ids, texts, readers[0], readers[1], kl_ab, kl_ba)
    return run, (kl_ab, same_top, readers[1].logprob, readers[0].logprob)


def _read(llm: LLM, logits: np.ndarray, ids: np.ndarray) -> ForcedSide:
    found = token_statistics(logits, ids)
    ends = sorted(stop_ids(llm) | template_end_tokens(llm))
    return ForcedSide(
        logprob=found.logprob,
        rank=found.rank,
        entropy=found.entropy,
        best=tuple(int(i) for i in found.best),
        best_texts=tuple(token_texts(llm, found.best)),
        end_probability=np.exp(logprobs_of(logits, ends)).sum(axis=1) if ends else np.zeros(len(ids)),
    )


def _shared_start(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))


def _warnings(side: Side) -> list[str]:
    missing = [text for token, text in side.template_end.items() if token not in side.stop_tokens]
    found = []
    if side.chat and missing:
        stops = ", ".join(side.stop_tokens.values()) or "none"
        found.append(
            f"{side.label}: the chat template ends a turn with {', '.join(missing)}, which is not in the stop set "
            f"({stops}): the answer runs past its end"
        )
    if not side.stop_tokens:
        found.append(
            f"{side.label}: the model's files name no end-of-sequence token, so only max_tokens ends an answer"
        )
    return found


def _notes(a: Condition, b: Condition, same: bool) -> list[str]:
    if same:
        return []
    return [
        f"{a.label} and {b.label} have different vocabularies: their tokens cannot be put beside each other, so "
        "divergence and each other's probabilities are left out. Bits per byte compare; perplexities a token do not."
    ]
