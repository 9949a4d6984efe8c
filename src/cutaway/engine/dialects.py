"""Dialects: the chains of Cutaway and of four other engines, written with the same stages.

The same settings choose from different sets in different engines, because each has its own order of the stages and
its own rule at a border. A chain is a list of named stages, in order; a stage that is off is left out. Greedy
decoding (temperature 0) is the stage that keeps one. Read next: `sampling.py`, which runs a chain and draws.

| dialect   | penalties look at             | order after the penalties        | top-k     |
|-----------|-------------------------------|----------------------------------|-----------|
| cutaway   | repetition all, counts output | temperature, top-k, top-p, min-p | exactly k |
| hf        | repetition all, no counts     | temperature, top-k, top-p, min-p | ties stay |
| vllm      | repetition all, counts output | temperature, min-p, top-k, top-p | ties stay |
| llama.cpp | the last 64                   | top-k, top-p, min-p, temperature | exactly k |
| mlx       | the last 20                   | top-p, min-p, top-k, temperature | exactly k |

All of them keep the token that crosses top-p, whether they sum from above until p is reached (llama.cpp) or drop from
below while the sum is at most 1 - p (the others): it is the same set. Which of equal tokens stays at that border, or
at the k-th of an exact top-k, depends on an unstable sort in theirs; here it is always the lowest id.

llama.cpp is its own programs, which show the penalties the prompt too. Its Python binding (llama-cpp-python) shows
them only what it has generated.

Sources: transformers 5.24 `generation/logits_process.py` and `generation/utils.py`; vllm `v1/sample/sampler.py`,
`v1/sample/ops/topk_topp_sampler.py`, `sampling_params.py`; llama.cpp `src/llama-sampler.cpp`, `common/sampling.cpp`;
mlx-lm `sample_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cutaway.engine import stages as s
from cutaway.engine.stages import Stage
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.engine.sampling import SamplingParams

__all__ = ["DIALECTS", "chain_of", "check_dialect"]

LLAMA_WINDOW = 64
MLX_WINDOW = 20
VLLM_COLDEST, VLLM_HOTTEST = 0.01, 2.0


def cutaway(p: SamplingParams) -> list[Stage]:
    """Ours. min-p and top-p cut the distribution that will be drawn from: after temperature."""
    chain = _bias(p) + _repetition(p) + _output_counts(p)
    if p.temperature == 0:
        return [*chain, ("greedy", lambda c, h: s.greedy(c))]
    if p.temperature != 1:
        chain.append(("temperature", lambda c, h: s.temperature(c, p.temperature)))
    if p.top_k:
        chain.append(("top_k", lambda c, h: s.top_k(c, p.top_k)))
    if p.top_p < 1:
        chain.append(("top_p", lambda c, h: s.top_p(c, p.top_p)))
    if p.min_p:
        chain.append(("min_p", lambda c, h: s.min_p(c, p.min_p)))
    return chain


def hf(p: SamplingParams) -> list[Stage]:
    """Hugging Face `generate`: temperature 0 stands for do_sample=False, where only the penalties act."""
    chain = _bias(p) + _repetition(p)
    if p.temperature == 0:
        return [*chain, ("greedy", lambda c, h: s.greedy(c))]
    if p.temperature != 1:
        chain.append(("temperature", lambda c, h: s.temperature(c, p.temperature)))
    if p.top_k:
        chain.append(("top_k", lambda c, h: s.top_k_with_ties(c, p.top_k)))
    if p.top_p < 1:
        chain.append(("top_p", lambda c, h: s.top_p(c, p.top_p)))
    if p.min_p:
        chain.append(("min_p", lambda c, h: s.min_p(c, p.min_p)))
    return chain


def vllm(p: SamplingParams) -> list[Stage]:
    """vLLM: a temperature between 0 and 0.01 is raised to 0.01, and min-p comes before top-k and top-p."""
    chain = _bias(p) + _repetition(p) + _output_counts(p)
    if p.temperature == 0:
        return [*chain, ("greedy", lambda c, h: s.greedy(c))]
    if p.temperature != 1:
        chain.append(("temperature", lambda c, h: s.temperature(c, max(p.temperature, VLLM_COLDEST))))
    if p.min_p:
        chain.append(("min_p", lambda c, h: s.min_p(c, p.min_p)))
    if p.top_k:
        chain.append(("top_k", lambda c, h: s.top_k_with_ties(c, p.top_k)))
    if p.top_p < 1:
        chain.append(("top_p", lambda c, h: s.top_p(c, p.top_p)))
    return chain


def llama_cpp(p: SamplingParams) -> list[Stage]:
    """llama.cpp: filters cut the model's own distribution; temperature comes last, and at 0 keeps the best of them."""
    chain = _bias(p)
    if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:

        def penalties(c: s.Candidates, h: s.History) -> s.Candidates:
            seen, counts = h.last_counts(LLAMA_WINDOW)
            c = s.penalise_repetition(c, seen, p.repetition_penalty)
            return s.penalise_counts(c, seen, counts, p.presence_penalty, p.frequency_penalty)

        chain.append(("penalties", penalties))
    if p.top_k:
        chain.append(("top_k", lambda c, h: s.top_k(c, p.top_k)))
    if p.top_p < 1:
        chain.append(("top_p", lambda c, h: s.top_p(c, p.top_p)))
    if p.min_p:
        chain.append(("min_p", lambda c, h: s.min_p(c, p.min_p)))
    if p.temperature == 0:
        chain.append(("greedy", lambda c, h: s.greedy(c)))
    elif p.temperature != 1:
        chain.append(("temperature", lambda c, h: s.temperature(c, p.temperature)))
    return chain


def mlx(p: SamplingParams) -> list[Stage]:
    """mlx-lm: penalties over the last 20 tokens, filters on the distribution at temperature 1, top-p 0 is off."""
    chain = _bias(p)
    if p.repetition_penalty != 1:
        chain.append(
            (
                "repetition_penalty",
                lambda c, h: s.penalise_repetition(c, h.last_counts(MLX_WINDOW)[0], p.repetition_penalty),
            )
        )
    if p.presence_penalty or p.frequency_penalty:
        chain.append(
            (
                "presence_frequency",
                lambda c, h: s.penalise_counts(
                    c, *h.last_counts(MLX_WINDOW), presence=p.presence_penalty, frequency=p.frequency_penalty
                ),
            )
        )
    if p.temperature == 0:
        return [*chain, ("greedy", lambda c, h: s.greedy(c))]
    if 0 < p.top_p < 1:
        chain.append(("top_p", lambda c, h: s.top_p(c, p.top_p)))
    if p.min_p:
        chain.append(("min_p", lambda c, h: s.min_p(c, p.min_p)))
    if p.top_k:
        chain.append(("top_k", lambda c, h: s.top_k(c, p.top_k)))
    if p.temperature != 1:
        chain.append(("temperature", lambda c, h: s.temperature(c, p.temperature)))
    return chain


def _bias(p: SamplingParams) -> list[Stage]:
    return [("logit_bias", lambda c, h: s.add_bias(c, p.logit_bias))] if p.logit_bias else []


def _repetition(p: SamplingParams) -> list[Stage]:
    """The repetition penalty over prompt and output, once per distinct id."""
    if p.repetition_penalty == 1:
        return []
    return [("repetition_penalty", lambda c, h: s.penalise_repetition(c, h.distinct(), p.repetition_penalty))]


def _output_counts(p: SamplingParams) -> list[Stage]:
    if not (p.presence_penalty or p.frequency_penalty):
        return []
    return [
        (
            "presence_frequency",
            lambda c, h: s.penalise_counts(c, *h.output_counts(), p.presence_penalty, p.frequency_penalty),
        )
    ]


DIALECTS: dict[str, Callable[[SamplingParams], list[Stage]]] = {
    "cutaway": cutaway,
    "hf": hf,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "mlx": mlx,
}


def chain_of(params: SamplingParams) -> list[Stage]:
    """The chain that `params.dialect` makes of `params`."""
    return DIALECTS[params.dialect](params)


def check_dialect(p: SamplingParams, vocab: int) -> None:
    """Refuse what the engine that `dialect` names would refuse, or has no such setting for."""

    def refuse(param: str, rule: str) -> None:
        raise RequestError(
            f"the {p.dialect} dialect does not take this {param}",
            found=getattr(p, param),
            expected=rule,
            param=param,
        )

    if p.dialect == "hf":
        for param in ("presence_penalty", "frequency_penalty"):
            if getattr(p, param):
                refuse(param, "0: Hugging Face generate has none")
    elif p.dialect == "vllm":
        if p.temperature > VLLM_HOTTEST:
            refuse("temperature", "0 to 2")
        if p.top_p == 0:
            refuse("top_p", "above 0")
    elif p.dialect == "mlx" and p.top_k >= vocab:
        refuse("top_k", f"below the vocabulary of {vocab}")
