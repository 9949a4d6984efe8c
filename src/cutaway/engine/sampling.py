"""Sampling: what a request may set, and how the next token is drawn from a row of logits.

`SamplingParams` is checked once, when it is made. `draw_token` runs the chain of the dialect (`dialects.py`, from the
stages of `stages.py`) and makes one draw with a counter-based random number, so that a seeded request draws the same
alone, in any batch, and after a preemption (law 7). What a draw can tell of itself is in `records.py`. No text here,
no model. Read next: `sequence.py`.

The order of the default chain: logit bias, repetition penalty, presence and frequency penalties, temperature, top-k,
top-p, min-p, softmax, one draw. Temperature 0 is greedy and the lowest id wins a tie.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutaway.engine.dialects import DIALECTS, chain_of
from cutaway.engine.records import StageRecord, StepRecord, TokenLogprobs, step_record, token_logprobs
from cutaway.engine.stages import Candidates, History, Stage, pick
from cutaway.errors import RequestError
from cutaway.forward.program import TopLogits

__all__ = [
    "Drawn",
    "SamplingParams",
    "StageRecord",
    "StepRecord",
    "TokenLogprobs",
    "draw_token",
    "uniform",
]

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_HEAD_TOP_K = 256  # beyond this a partial head saves nothing


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one request. Every value is checked; one out of range is a RequestError that names it.

    temperature         >= 0; 0 is greedy
    top_k               the k most probable, exactly; 0, None or -1 is off
    top_p               0 to 1: the fewest most probable tokens whose probabilities reach it; 1 is off, 0 keeps one
    min_p               0 to 1: at least this share of the most probable token's probability; 0 is off
    repetition_penalty  > 0; 1 is off. Looks at prompt and output, once an id
    presence_penalty, frequency_penalty   -2 to 2; 0 is off. Look at the output only
    logit_bias          token id -> -100 to 100, added to the logit before anything else
    seed                any 64-bit integer; None draws one from the system, and the result tells which
    n                   choices for the same prompt; choice 0 is what n=1 would give
    max_tokens          None: up to the end of the context
    stop                strings that end the text (they are no part of it); a string or several
    stop_token_ids      ids that end the text, beside the model's own end tokens
    ignore_eos          go on past the model's own end tokens
    logprobs            None, or how many most probable tokens to report beside the chosen one, 0 to 20
    dialect             cutaway, hf, vllm, llama.cpp or mlx: whose order and rules the chain follows
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    dialect: str = "cutaway"

    def __post_init__(self) -> None:
        def settle(param: str, value: Any) -> None:
            object.__setattr__(self, param, value)

        for param, low, high in (
            ("temperature", 0, math.inf),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0, math.inf),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            settle(param, _real(param, getattr(self, param), low, high))
        if self.repetition_penalty == 0:
            raise _refused("repetition_penalty", 0, "a number above 0")
        settle("top_k", max(_integer("top_k", 0 if self.top_k is None else self.top_k, -1), 0))
        settle("n", _integer("n", self.n, 1, MAX_CHOICES))
        for param, low, high in (
            ("seed", -(2**63), 2**64 - 1),
            ("max_tokens", 0, math.inf),
            ("logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, param) is not None:
                settle(param, _integer(param, getattr(self, param), low, high))
        settle("logit_bias", _bias(self.logit_bias))
        settle("stop", _stops(self.stop))
        settle("stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "true or false")
        if self.dialect not in DIALECTS:
            raise _refused("dialect", self.dialect, ", ".join(DIALECTS))

    @functools.cached_property
    def chain(self) -> list[Stage]:
        """The named stages these settings switch on, in order."""
        return chain_of(self)

    @property
    def head_top_k(self) -> int | None:
        """How many of the largest logits are enough for these settings; None where all are needed."""
        if self.logprobs is not None or self.logit_bias or self.repetition_penalty != 1:
            return None
        if self.presence_penalty or self.frequency_penalty:
            return None
        if self.temperature == 0:
            return 1
        if self.dialect == "cutaway" and 0 < self.top_k <= MAX_HEAD_TOP_K:
            return self.top_k  # exactly k, and nothing before top-k looks past them
        return None


@dataclass(frozen=True)
class Drawn:
    """One drawn token, with what was asked to be told about it."""

    token: int
    logprobs: TokenLogprobs | None = None
    record: StepRecord | None = None


# -- drawing ------------------------------------------------------------------------------------------------------


def uniform(seed: int, index: int, position: int) -> float:
    """The random number for choice `index`, token at `position`: 53 bits, in [0, 1).

    Philox 4x32-10 with the 64-bit seed as key and (position, index, 0, 0) as counter: a function of these three and
    of nothing that was drawn before. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    first, second, _, _ = _philox((position, index, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((first >> 5) * 2**26 + (second >> 6)) / 2**53


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF
        c2, c3 = (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def candidates(logits: np.ndarray | TopLogits, row: int) -> Candidates:
    """The candidates of output row `row`: the whole vocabulary, or the k largest logits that a partial head gave.

    Raises: RequestError if the row holds NaN or nothing but -inf: there is no distribution to draw from.
    """
    if isinstance(logits, TopLogits):
        c = Candidates(logits.ids[row], logits.values[row], ordered=True)
    else:
        c = Candidates.of(logits[row])
    if not math.isfinite(c.peak):  # a NaN counts as the largest
        raise RequestError("the logits are no distribution", found=f"a maximum of {c.peak}", expected="a finite number")
    return c


def draw_token(
    c: Candidates, params: SamplingParams, history: History, *, seed: int, index: int, position: int, record: bool
) -> Drawn:
    """Run the chain over `c` and draw the token for `position`."""
    stages = [("model", c)]
    for name, stage in params.chain:
        stages.append((name, stage(stages[-1][1], history)))
    kept = stages[-1][1]
    if len(kept) == 1 and not record and params.logprobs is None:
        return Drawn(int(kept.ids[0]))

    u = None if params.temperature == 0 else uniform(seed, index, position)
    place, before = pick(kept, u or 0.0)
    token = int(kept.ids[place])
    logprobs = None if params.logprobs is None else token_logprobs(c, kept, place, params.logprobs)
    return Drawn(token, logprobs, step_record(position, stages, place, u, before) if record else None)


# -- checking -----------------------------------------------------------------------------------------------------


def _refused(param: str, found: object, expected: str) -> RequestError:
    return RequestError(f"{param} is not valid", found=repr(found)[:80], expected=expected, param=param)


def _real(param: str, value: Any, low: float, high: float) -> float:
    rule = f"a number from {low:g} to {high:g}" if math.isfinite(high) else f"a finite number from {low:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refused(param, value, rule)
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        raise _refused(param, value, rule)
    return number + 0.0  # -0.0 becomes 0.0


def _integer(param: str, value: Any, low: float, high: float = math.inf) -> int:
    rule = f"an integer from {low:g} to {high:g}" if math.isfinite(high) else f"an integer from {low:g}"
    if isinstance(value, (bool, np.bool_)):
        raise _refused(param, value, rule)
    try:
        number = operator.index(value)
    except TypeError:
        raise _refused(param, value, rule) from None
    if not low <= number <= high:
        raise _refused(param, value, rule)
    return number


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)):
        raise _refused("stop_token_ids", value, "a list of token ids")
    try:
        return tuple(_integer("stop_token_ids", token, 0) for token in value or ())
    except TypeError:
        raise _refused("stop_token_ids", value, "a list of token ids") from None


def _stops(value: Any) -> tuple[str, ...]:
    rule = f"up to {MAX_STOPS} strings, none empty"
    try:
        stops = (value,) if isinstance(value, str) else tuple(value or ())
    except TypeError:
        raise _refused("stop", value, rule) from None
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise _refused("stop", value, rule)
    return stops


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refused("logit_bias", value, "a mapping of token ids to numbers")
    bias: dict[int, float] = {}
    for token, amount in value.items():
        if isinstance(token, str) and token.isascii() and token.isdigit():
            token = int(token)  # JSON has no integer keys
        bias[_integer("logit_bias", token, 0)] = _real("logit_bias", amount, -100, 100)
    return bias
