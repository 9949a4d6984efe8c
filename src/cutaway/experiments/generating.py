"""Continuations of a prompt with everything the experiments want to know of them: records, times, cache on or off.

Runs an Engine of its own, with a KV cache just long enough, over the model's interpreter; the model's own engine and
its prefix cache are left alone, so nothing measured here was found in a cache. Read next: `sampler.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cutaway.engine.engine import Engine
from cutaway.engine.sampling import SamplingParams, StepRecord
from cutaway.engine.sequence import Sequence as EngineSequence
from cutaway.errors import ContextLengthError
from cutaway.experiments.passes import chat_ids, prompt_ids, token_texts

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["DEFAULT_TOKENS", "Generated", "generate", "prompt_text", "request_ids"]

DEFAULT_TOKENS = 64


@dataclass(frozen=True)
class Generated:
    """One continuation. `ids` are the tokens of its text: a token that ended it is not among them.

    `step_s[0]` is the time to the first token (the prompt and its draw), the others are one step each; they are kept
    where one continuation was made alone. `records` has an entry for the ending token too.
    """

    ids: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    records: tuple[StepRecord, ...]
    step_s: tuple[float, ...]

    @property
    def prefill_s(self) -> float:
        return self.step_s[0]

    @property
    def decode_s(self) -> float:
        return sum(self.step_s[1:])


def request_ids(llm: LLM, prompt: str, raw: bool = False) -> list[int]:
    """Ids of a prompt as a user's turn in the model's chat template; as it is with `raw` or where there is none."""
    if raw or llm.chat_template is None:
        return prompt_ids(llm, prompt)
    return chat_ids(llm, [{"role": "user", "content": prompt}])


def prompt_text(llm: LLM, prompt: str | Sequence[int]) -> str:
    """A prompt as the model gets it: control tokens are written out."""
    return prompt if isinstance(prompt, str) else "".join(token_texts(llm, prompt))


def generate(
    llm: LLM,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    record: bool = False,
    kv_cache: bool = True,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Generated]:
    """The `params.n` continuations of a prompt of ids, choice 0 first; without max_tokens at most 64 tokens each.

    When `budget_s` seconds are over, those not finished end with "cancelled".

    Raises: RequestError for a setting that is refused; ContextLengthError where prompt and tokens do not fit.
    """
    limit = DEFAULT_TOKENS if params.max_tokens is None else params.max_tokens
    if len(ids) + limit > llm.max_context:
        raise ContextLengthError(
            "prompt and tokens do not fit the context",
            found=f"{len(ids)} + {limit} tokens",
            expected=f"at most {llm.max_context}",
            param="max_tokens",
        )
    context = min(max(len(ids) + limit + 1, 2), llm.config.max_context)
    engine = Engine(
        llm.interpreter,
        llm.config,
        max_context=context,
        num_blocks=-(-context // 32) * params.n,
        eos_ids=llm.checkpoint.eos_ids | llm.tokenizer.eos_ids,
        k_type=llm.k_type,
        v_type=llm.v_type,
        max_seqs=params.n,
        prefix_cache=False,
        kv_cache=kv_cache,
    )
    sequences = engine.add(ids, _limited(params, limit), record=record)
    times: list[float] = []
    first = started = clock()
    while engine.has_work:
        events = engine.step()
        if events:  # a step inside a long prompt draws nothing; its time belongs to the first token
            now = clock()
            times.append(now - started)
            started = now
        for event in events:
            if params.stop and event.token is not None and _stopped(llm, event.sequence, params):
                engine.stop(event.sequence)
        if budget_s is not None and started - first > budget_s:
            for sequence in sequences:
                engine.cancel(sequence)
    alone = tuple(times) if params.n == 1 else ()
    return [_generated(llm, sequence, params, alone) for sequence in sequences]


def _limited(params: SamplingParams, limit: int) -> SamplingParams:
    return params if params.max_tokens is not None else replace(params, max_tokens=limit)


def _ids(sequence: EngineSequence) -> list[int]:
    ids = list(sequence.output_ids)
    return ids[:-1] if sequence.stop_token is not None and ids and ids[-1] == sequence.stop_token else ids


def _stopped(llm: LLM, sequence: EngineSequence, params: SamplingParams) -> bool:
    text = llm.detokenize(_ids(sequence))
    return any(stop in text for stop in params.stop)


def _generated(llm: LLM, sequence: EngineSequence, params: SamplingParams, times: tuple[float, ...]) -> Generated:
    ids = _ids(sequence)
    text = llm.detokenize(ids)
    ends = [at for at in (text.find(stop) for stop in params.stop) if at >= 0]
    return Generated(
        ids=tuple(ids),
        text=text[: min(ends)] if ends else text,
        finish_reason=str(sequence.finish_reason),
        seed=sequence.seed,
        records=tuple(sequence.record or ()),
        step_s=times,
    )
