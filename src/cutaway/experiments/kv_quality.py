"""What a smaller KV cache costs: the same text through the same kernels with keys and values stored in each type.

Every type is held against float32 keys and values of the same weights. The distance is measured on the next-token
distributions (Kullback-Leibler divergence: perplexity hides much of it), and layer by layer on what attention gives,
with every layer fed the residual of the float32 run, so that a layer answers for its own error only.
Read next: `distributions.py`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.engine.kv_cache import KVCache
from cutaway.engine.sampling import SamplingParams
from cutaway.engine.sequence import Sequence as EngineSequence
from cutaway.engine.sequence import build_batch
from cutaway.errors import RequestError
from cutaway.experiments.distributions import divergences, log_softmax
from cutaway.experiments.generating import generate
from cutaway.experiments.passes import prompt_ids
from cutaway.forward.taps import Taps

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["KVQuality", "KVTypeQuality", "default_types", "own_text", "quality"]

CHUNK = 64  # rows of logits held at once for each type
BLOCK_SIZE = 32
DECODE_STEPS = 16
OWN_TOKENS = 192


@dataclass(frozen=True)
class KVTypeQuality:
    """One choice of types against float32 keys and values, over all positions of the text.

    `kl_mean`, `kl_999` (99.9th percentile) and `kl_max` are in nats; `same_top` is the share of positions with the
    same most probable token; `decode_s` is the median time of a decode step behind the text.
    `layer_errors[i]` is the relative error of layer i's attention output: ||a - a32|| / ||a32||.
    """

    k_type: str
    v_type: str
    bytes_per_token: int
    kv_bytes: int
    decode_s: float
    perplexity: float
    kl_mean: float
    kl_999: float
    kl_max: float
    same_top: float
    layer_errors: tuple[float, ...]


@dataclass(frozen=True)
class KVQuality:
    """The types compared on one text. `rows[0]` is float32 against itself: its distances are zero.

    `num_tokens` of the text's `text_tokens` were looked at.
    """

    model: str
    activations: str
    num_tokens: int
    text_tokens: int
    rows: tuple[KVTypeQuality, ...]


def default_types(head_dim: int) -> list[tuple[str, str]]:
    """(k_type, v_type) pairs worth comparing."""
    types = [("f16", "f16")]
    if head_dim % 32 == 0:
        types += [("f16", "q8_0"), ("q8_0", "f16"), ("q8_0", "q8_0")]
    return types


def own_text(llm: LLM, ids: Sequence[int], tokens: int = OWN_TOKENS) -> list[int]:
    """A prompt and the model's own greedy continuation, as far as the context goes: a text where none is given."""
    room = max(1, min(tokens, llm.max_context - len(ids) - 1))
    return [*ids, *generate(llm, ids, SamplingParams(max_tokens=room, ignore_eos=True))[0].ids]


class _Lane:
    """The text in one KV cache of its own."""

    def __init__(self, llm: LLM, ids: Sequence[int], k_type: str, v_type: str) -> None:
        self.interpreter = llm.interpreter
        blocks = -(-(len(ids) + DECODE_STEPS + 1) // BLOCK_SIZE)
        self.kv_cache = KVCache(llm.config, blocks, k_type, v_type, BLOCK_SIZE)
        self.sequence = EngineSequence(0, tuple(ids), SamplingParams(), blocks=list(range(blocks)))

    def restart(self) -> None:
        self.sequence.num_computed = 0

    def step(self, take: int, all_rows: bool, taps: Taps | None = None, head_top_k: int | None = None) -> Any:
        batch = build_batch([(self.sequence, take)], BLOCK_SIZE, all_rows=all_rows, head_top_k=head_top_k)
        logits = self.interpreter.run(batch, self.kv_cache, taps)
        self.sequence.num_computed += take
        return logits

    def decode(self, token: int) -> float:
        """Seconds of one decode step."""
        self.sequence.output_ids.append(token)
        start = time.perf_counter()
        self.step(1, False, head_top_k=1)
        return time.perf_counter() - start


def quality(
    llm: LLM,
    text: str | Sequence[int],
    types: Iterable[tuple[str, str]] | None = None,
    *,
    limit: int = 512,
    progress: Callable[[str], None] = lambda line: None,
) -> KVQuality:
    """Compare KV cache types (pairs of key and value type) on the first `limit` tokens of a text.

    Raises: RequestError for a text under two tokens, or an unknown type.
    """
    whole = list(llm.tokenize(text)) if isinstance(text, str) else list(text)
    ids = prompt_ids(llm, whole[: max(min(limit, llm.max_context - DECODE_STEPS), 1)], "text")
    if len(ids) < 2:
        raise RequestError("the text is too short to compare on", found="1 token", expected="at least 2", param="text")
    asked = list(default_types(llm.config.head_dim) if types is None else types)
    pairs = list(dict.fromkeys([("f32", "f32"), *asked]))
    lanes = [_Lane(llm, ids, *pair) for pair in pairs]
    divergence, loss, same = _distances(lanes, ids, progress)
    errors = _layer_errors(llm, lanes, len(ids), progress)
    progress("decode rate")
    times = _decode_times(lanes, ids)
    rows = []
    for i, (lane, (k_type, v_type)) in enumerate(zip(lanes, pairs, strict=True)):
        rows.append(
            KVTypeQuality(
                k_type=k_type,
                v_type=v_type,
                bytes_per_token=KVCache.bytes_per_token(llm.config, k_type, v_type),
                kv_bytes=lane.kv_cache.nbytes,
                decode_s=times[i],
                perplexity=math.exp(loss[i] / (len(ids) - 1)),
                kl_mean=float(divergence[i].mean()),
                kl_999=float(np.quantile(divergence[i], 0.999)),
                kl_max=float(divergence[i].max()),
                same_top=same[i] / len(ids),
                layer_errors=tuple(errors[i]),
            )
        )
    activations = str(getattr(llm.interpreter, "activations", "f32"))
    return KVQuality(llm.name, activations, len(ids), len(whole), tuple(rows))


def _chunks(total: int) -> list[tuple[int, int]]:
    return [(start, min(CHUNK, total - start)) for start in range(0, total, CHUNK)]


def _distances(
    lanes: Sequence[_Lane], ids: Sequence[int], progress: Callable[[str], None]
) -> tuple[list[np.ndarray], list[float], list[int]]:
    """For each lane: divergence from lane 0 at each position, summed loss, positions with lane 0's top token."""
    parts: list[list[np.ndarray]] = [[] for _ in lanes]
    loss, same = [0.0] * len(lanes), [0] * len(lanes)
    for start, take in _chunks(len(ids)):
        progress(f"distributions, token {start} of {len(ids)}")
        following = ids[start + 1 : start + take + 1]
        base: np.ndarray | None = None
        for i, lane in enumerate(lanes):
            logits = np.asarray(lane.step(take, True))
            base = logits.copy() if base is None else base  # the interpreter may use its buffer again
            parts[i].append(divergences(base, logits))
            same[i] += int((logits.argmax(axis=1) == base.argmax(axis=1)).sum())
            for row, token in enumerate(following):
                loss[i] -= float(log_softmax(logits[row])[token])
    return [np.concatenate(part) for part in parts], loss, same


def _layer_errors(llm: LLM, lanes: Sequence[_Lane], total: int, progress: Callable[[str], None]) -> list[list[float]]:
    """Relative error of each layer's attention output, every layer given the residual of lane 0."""
    layers = range(llm.config.num_layers)
    outputs = [f"layers.{i}.attn.mix" for i in layers]
    residuals = [f"layers.{i}.residual" for i in layers][:-1]
    squares = np.zeros((len(lanes), len(layers)))
    norms = np.zeros(len(layers))
    for lane in lanes:
        lane.restart()
    for start, take in _chunks(total):
        progress(f"layers, token {start} of {total}")
        taps = Taps(llm.program, [*outputs, *residuals])
        lanes[0].step(take, False, taps)
        kept = taps.recording
        exact = {name: kept[name] for name in outputs}
        norms += [float(np.sum(np.square(exact[name], dtype=np.float64))) for name in outputs]
        patch = {name: (lambda tensor, value=kept[name]: value) for name in residuals}
        for i, lane in enumerate(lanes):
            if i == 0:
                continue
            taps = Taps(llm.program, outputs, patch)
            lane.step(take, False, taps)
            for j, name in enumerate(outputs):
                squares[i, j] += float(np.sum(np.square(taps.recording[name] - exact[name], dtype=np.float64)))
    return np.sqrt(squares / np.maximum(norms, 1e-300)).tolist()


def _decode_times(lanes: Sequence[_Lane], ids: Sequence[int]) -> list[float]:
    """Median seconds of a decode step for each lane, the lanes taken in turn; the first step of each warms up."""
    times: list[list[float]] = [[] for _ in lanes]
    for step in range(DECODE_STEPS):
        for i, lane in enumerate(lanes):
            seconds = lane.decode(ids[step % len(ids)])
            if step:
                times[i].append(seconds)
    return [statistics.median(found) for found in times]
