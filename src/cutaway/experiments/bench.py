"""llama-bench's tests on this engine: `pp512`, `tg128`, `pp512+tg128`, each at a depth (`@ d4096`) if asked.

Timed like llama-bench: the forward pass alone. Batches are laid out before the clock starts, the tokens before the
test's own are computed outside it, a warm-up goes before, and nothing is found in a cache. Tokenising and sampling are
left out of the rates and told beside them, with the bytes a token moves and the share of the measured bandwidth that
this is. `BenchRow` has llama-bench's field names. Read next: `profile.py`.
"""

from __future__ import annotations

import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway import __version__
from cutaway.engine.kv_cache import KVCache
from cutaway.engine.sampling import SamplingParams, candidates, draw_token
from cutaway.engine.sequence import Batch
from cutaway.engine.stages import History
from cutaway.errors import ContextLengthError, RequestError
from cutaway.experiments.lane import TEXT, Lane, bandwidth, random_ids, traffic, weight_sizes, with_threads
from cutaway.experiments.machine import machine
from cutaway.forward.program import TopLogits

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Bench", "BenchRow", "BenchSettings", "BenchTest", "bench", "planned", "summary"]


@dataclass(frozen=True)
class BenchTest:
    """One thing to time: `n_prompt` tokens computed together, then `n_gen` one by one, behind `n_depth` others."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        """llama-bench's name: `pp512`, `tg128`, `pp512+tg128`, `pp512 @ d4096`."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def tokens(self) -> int:
        """Tokens it times."""
        return self.n_prompt + self.n_gen

    @property
    def context(self) -> int:
        """Tokens that are in the KV cache at its end."""
        return self.n_depth + self.tokens


@dataclass(frozen=True)
class BenchSettings:
    """What is swept; every combination is run. `threads`: None is the interpreter's own number.

    A step takes `min(batch, ubatch)` tokens of a prompt at most. `head_top_k`: None computes all logits, as llama-bench
    does; k computes the k largest of each row, as greedy and top-k requests do, and feeds the likeliest token back.
    """

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    pairs: tuple[tuple[int, int], ...] = ()
    n_depth: tuple[int, ...] = (0,)
    threads: tuple[int | None, ...] = (None,)
    batch: tuple[int, ...] = (2048,)
    ubatch: tuple[int, ...] = (512,)
    k_types: tuple[str, ...] = ("f16",)
    v_types: tuple[str, ...] = ("f16",)
    repetitions: int = 5
    warm_up: bool = True
    head_top_k: int | None = None

    @property
    def context(self) -> int:
        """Tokens the longest test needs room for."""
        return max((test.context for test in planned(self)), default=0)


@dataclass(frozen=True)
class BenchRow:
    """One test with one combination of settings: llama-bench's fields under its names, then what it leaves out.

    Rates are means over the repetitions, tokens a second, with the sample standard deviation. The device fields that
    a CPU engine has no choice about hold what llama-bench writes for a CPU.
    """

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    cpu_mask: str = "0x0"
    cpu_strict: bool = False
    poll: int = 50
    n_gpu_layers: int = 0
    split_mode: str = "none"
    main_gpu: int = 0
    no_kv_offload: bool = False
    flash_attn: bool = True
    tensor_split: str = "0.00"
    tensor_buft_overrides: str = "none"
    use_mmap: bool = True
    embeddings: bool = False
    no_op_offload: int = 0
    # What llama-bench leaves out.
    test: str = ""
    isa: str = ""
    activations: str = ""
    head_top_k: int | None = None  # None: all logits
    tokenize_s: float | None = None  # of a text as long as the prompt
    sample_s: float | None = None  # of one greedy token
    bytes_per_token: float = 0.0  # weights and KV cache
    bandwidth_bytes_s: float = 0.0  # measured at these threads, before and after; the better
    bandwidth_percent: float = 0.0  # bytes_per_token * avg_ts / bandwidth_bytes_s


@dataclass(frozen=True)
class Bench:
    """All rows of a run."""

    model: str
    cpu_info: str
    warm_up: bool
    repetitions: int
    rows: tuple[BenchRow, ...] = field(default_factory=tuple)


def planned(settings: BenchSettings) -> list[BenchTest]:
    """The tests in llama-bench's order: for each depth the prompts, the generations, the pairs. 0 leaves one out."""
    found = []
    for depth in settings.n_depth:
        found += [BenchTest(n, 0, depth) for n in settings.n_prompt if n]
        found += [BenchTest(0, n, depth) for n in settings.n_gen if n]
        found += [BenchTest(p, n, depth) for p, n in settings.pairs if p or n]
    return found


def summary(tokens: int, samples_ns: Sequence[int]) -> dict[str, Any]:
    """Mean and sample standard deviation (0 for one sample) of the times and of the rates, under llama-bench's names.

    500 tokens in 2.0 s are 250 tokens a second; rates are averaged as rates, not taken from the average time.
    """
    samples_ts = tuple(1e9 * tokens / ns if ns > 0 else 0.0 for ns in samples_ns)
    several = len(samples_ns) > 1
    return {
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(statistics.stdev(samples_ns)) if several else 0,
        "avg_ts": statistics.fmean(samples_ts),
        "stddev_ts": statistics.stdev(samples_ts) if several else 0.0,
        "samples_ns": tuple(samples_ns),
        "samples_ts": samples_ts,
    }


def bench(
    llm: LLM,
    settings: BenchSettings | None = None,
    *,
    progress: Callable[[str], None] = lambda line: None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    bandwidth_of: Callable[[int], float] = bandwidth,
) -> Bench:
    """Run every test with every combination of settings.

    Raises: RequestError where there is nothing to run or a number makes no sense; ContextLengthError where a test does
    not fit the model's `max_context`.
    """
    settings = settings or BenchSettings()
    _check(llm, settings)
    told = machine()
    facts = _facts(llm, told.processor)
    rows = []
    for threads in settings.threads:
        interpreter = with_threads(llm.interpreter, threads)
        count = int(getattr(interpreter, "threads", 1))
        progress(f"memory bandwidth of {count} threads")
        before = bandwidth_of(count)
        made = [
            _row(llm, interpreter, settings, test, combination, facts, progress, clock_ns)
            for *combination, test in itertools.product(
                settings.k_types, settings.v_types, settings.batch, settings.ubatch, planned(settings)
            )
        ]
        roof = max(before, bandwidth_of(count))
        rows += [_under(roof, row) for row in made]
    return Bench(llm.name, told.processor, settings.warm_up, settings.repetitions, tuple(rows))


def _check(llm: LLM, settings: BenchSettings) -> None:
    for name, values in (("n_prompt", settings.n_prompt), ("n_gen", settings.n_gen), ("n_depth", settings.n_depth)):
        if any(value < 0 for value in values):
            raise RequestError(f"{name} is a number of tokens", found=min(values), expected="0 or more", param=name)
    for name, values in (("batch", settings.batch), ("ubatch", settings.ubatch)):
        if not values or min(values) < 1:
            raise RequestError(f"{name} is a number of tokens", found=list(values), expected="1 or more", param=name)
    if settings.repetitions < 1:
        raise RequestError("repetitions", found=settings.repetitions, expected="at least 1", param="repetitions")
    if settings.head_top_k is not None and not 1 <= settings.head_top_k <= llm.config.vocab:
        raise RequestError("the head", found=settings.head_top_k, expected=f"1 to {llm.config.vocab}", param="head")
    if any(threads is not None and threads < 1 for threads in settings.threads):
        raise RequestError("threads", found=list(settings.threads), expected="at least 1", param="threads")
    if not planned(settings):
        raise RequestError("there is nothing to run", expected="a number of tokens above 0 for -p, -n or -pg")
    if settings.context > llm.max_context:
        raise ContextLengthError(
            "a test does not fit the context",
            found=f"{settings.context} tokens",
            expected=f"at most {llm.max_context}",
            param="n_depth",
        )


def _row(
    llm: LLM,
    interpreter: Any,
    settings: BenchSettings,
    test: BenchTest,
    combination: Sequence[Any],
    facts: dict[str, Any],
    progress: Callable[[str], None],
    clock_ns: Callable[[], int],
) -> BenchRow:
    k_type, v_type, n_batch, n_ubatch = combination
    count = int(getattr(interpreter, "threads", 1))
    lane = Lane(llm.config, interpreter, test.context, k_type, v_type)
    chunk = min(n_batch, n_ubatch)
    ids = random_ids(llm.config.vocab, test.context)
    depth, prompt, rest = ids[: test.n_depth], ids[test.n_depth :][: test.n_prompt], ids[test.n_depth + test.n_prompt :]
    here = f"{test.name}, {count} threads"
    if depth:
        progress(f"{here}: the {test.n_depth} tokens before")
        lane.run(lane.prefill(depth, 0, chunk, output=False))
    batches = lane.prefill(prompt, test.n_depth, chunk, head_top_k=settings.head_top_k)
    first = len(batches)
    batches += lane.decode(rest, test.n_depth + test.n_prompt, head_top_k=settings.head_top_k)
    if settings.warm_up:
        progress(f"{here}: warming up")
        lane.run(batches[: first + 1])
    started = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    samples, logits = [], None
    for repetition in range(settings.repetitions):
        progress(f"{here}: {repetition + 1} of {settings.repetitions}")
        start = clock_ns()
        logits = lane.run(batches)
        samples.append(clock_ns() - start)
    per_token = KVCache.bytes_per_token(llm.config, k_type, v_type)
    return BenchRow(
        **facts,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_threads=count,
        type_k=k_type,
        type_v=v_type,
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.n_depth,
        test_time=started,
        **summary(test.tokens, samples),
        test=test.name,
        head_top_k=settings.head_top_k,
        tokenize_s=_tokenize_s(llm, test.n_prompt) if test.n_prompt else None,
        sample_s=_sample_s(logits),
        bytes_per_token=_bytes(llm, lane, batches, per_token) / test.tokens,
    )


def _under(roof: float, row: BenchRow) -> BenchRow:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    percent = 100 * row.bytes_per_token * row.avg_ts / roof if roof > 0 else 0.0
    return BenchRow(**{**values, "bandwidth_bytes_s": roof, "bandwidth_percent": percent})


def _bytes(llm: LLM, lane: Lane, batches: Sequence[Batch], kv_bytes_per_token: int) -> int:
    """Bytes of weights and KV cache that the last run moved; activations stay near the cores and are not counted."""
    sizes, names = weight_sizes(llm, lane.interpreter), llm.program.names
    total = 0
    for batch, finished in zip(batches, lane.head_rows, strict=True):
        computed = names if len(batch.output_rows) else names[: names.index("outputs")]
        moved = traffic(llm.program, computed, sizes, batch, kv_bytes_per_token=kv_bytes_per_token, head_rows=finished)
        total += moved.weight_bytes + moved.kv_bytes
    return total


def _tokenize_s(llm: LLM, tokens: int, repeats: int = 3) -> float:
    """Seconds to tokenise a text of about that many tokens: the median of a few."""
    text = TEXT * (-(-tokens // len(llm.tokenize(TEXT))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = len(llm.tokenize(text))
        times.append((time.perf_counter() - start) * tokens / found)
    return statistics.median(times)


def _sample_s(logits: np.ndarray | TopLogits | None, repeats: int = 5) -> float | None:
    """Seconds to choose one token greedily from the logits of a step: the median of a few."""
    if logits is None:
        return None
    params, times = SamplingParams(), []
    for _ in range(repeats):
        start = time.perf_counter()
        draw_token(candidates(logits, 0), params, History((), []), seed=0, index=0, position=0, record=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _facts(llm: LLM, processor: str) -> dict[str, Any]:
    checkpoint, config = llm.checkpoint, llm.config
    held: dict[str, int] = {}
    for weight in checkpoint.weights.values():
        held[weight.format] = held.get(weight.format, 0) + weight.nbytes
    params = checkpoint.params
    size = f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.0f}M"
    return {
        "build_commit": __version__,
        "build_number": 0,
        "cpu_info": processor,
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": str(checkpoint.files[0]) if checkpoint.files else llm.name,
        "model_type": f"{config.architecture} {size} {'+'.join(sorted(held, key=lambda f: -held[f])[:2])}",
        "model_size": checkpoint.nbytes,
        "model_n_params": params,
        "isa": str(getattr(llm.interpreter, "isa", "")),
        "activations": str(getattr(llm.interpreter, "activations", "")),
    }
