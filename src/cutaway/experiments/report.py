"""The whole article for one model on this machine: every experiment, run one after another.

Nothing is computed here that another experiment does not compute; this file says in which order, with which settings,
and keeps the command that makes each figure again. Read next: `render/views/report.py`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutaway.engine.sampling import SamplingParams
from cutaway.experiments import kv_bench, kv_quality, sampler
from cutaway.experiments.compare import Comparison, Condition, compare
from cutaway.experiments.generating import generate, request_ids
from cutaway.experiments.kv import KVPlan, plan
from cutaway.experiments.kv_bench import KVBench
from cutaway.experiments.kv_quality import KVQuality
from cutaway.experiments.machine import Machine, machine
from cutaway.experiments.passes import prompt_ids
from cutaway.experiments.sampler import Dialects, Sampled, Temperatures
from cutaway.experiments.trace import Trace, trace
from cutaway.files.catalogue import DEFAULT

if TYPE_CHECKING:
    from cutaway.llm import LLM

__all__ = ["Model", "Report", "Settings", "Stability", "report"]

LENS_POSITIONS = 6


@dataclass(frozen=True)
class Settings:
    """What the report is made with."""

    tokens: int = 48  # of a continuation
    lengths: tuple[int, ...] = kv_bench.LENGTHS
    budget_s: float | None = kv_bench.BUDGET_S
    temperatures: tuple[float, ...] = (0.3, 1.5)
    continuations: int = 5
    sampled: float = 0.8  # temperature of the step by step view
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0
    context: int | None = None  # of the memory plan; None: as trained


@dataclass(frozen=True)
class Model:
    """The model's own facts."""

    name: str
    files: tuple[str, ...]
    architecture: str
    params: int
    nbytes: int
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied_head: bool
    has_template: bool


@dataclass(frozen=True)
class Stability:
    """The same greedy request several times. `same`: every run gave the same tokens."""

    runs: int
    same: bool
    tokens: int
    text: str


@dataclass(frozen=True)
class Report:
    """All of it. Parts that a model cannot show (no chat template) are None. `commands` make each part again."""

    prompt: str
    model: Model
    machine: Machine
    settings: Settings
    made: str  # local time, ISO 8601
    seconds: float
    trace: Trace
    plan: KVPlan
    bench: KVBench
    quality: KVQuality
    stability: Stability
    sampled: Sampled
    temperatures: Temperatures
    dialects: Dialects
    comparison: Comparison | None
    commands: Mapping[str, str]


def report(
    llm: LLM,
    prompt: str,
    settings: Settings | None = None,
    *,
    model_argument: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run every experiment on `prompt`; where the model has a chat template the generations go through it.

    `model_argument` is how the user named the model, for the commands. Raises what the experiments raise.
    """
    s = settings or Settings()
    started = time.perf_counter()
    raw = prompt_ids(llm, prompt)
    has_template = llm.chat_template is not None
    asked = request_ids(llm, prompt)
    kv_bench.check_lengths(llm, asked, s.lengths)  # before minutes of work, not after

    progress("one forward pass")
    middle = llm.config.num_layers // 2
    traced = trace(llm, raw, lens_positions=LENS_POSITIONS, attention=[(0, 0), (middle, 0)])
    planned = plan(
        llm.config,
        llm.checkpoint.nbytes,
        s.context,
        llm.k_type,
        llm.v_type,
        model=llm.name,
    )
    benched = kv_bench.bench(
        llm, asked, s.lengths, budget_s=s.budget_s, progress=lambda line: progress(f"KV cache: {line}")
    )
    progress("KV cache types")
    text = kv_quality.own_text(llm, asked)
    quality = kv_quality.quality(llm, text, progress=lambda line: progress(f"KV cache types: {line}"))
    progress("greedy, three times")
    stable = _stability(llm, asked, s)
    progress("sampling")
    params = SamplingParams(
        temperature=s.sampled, top_k=s.top_k, top_p=s.top_p, seed=s.seed, max_tokens=min(s.tokens, 24)
    )
    origins = {
        name: sampler.Origin(getattr(params, name), "report" if getattr(params, name) != default else "default")
        for name, default in sampler.shown_settings(SamplingParams()).items()
    }
    sampled = sampler.sample(llm, asked, params, settings=origins)
    warm = SamplingParams(seed=s.seed, max_tokens=s.tokens)
    temperatures = sampler.temperatures(llm, asked, s.temperatures, warm, s.continuations)
    dialects = sampler.dialects(llm, asked, SamplingParams(temperature=1.5, top_p=0.9, min_p=0.05))
    comparison = None
    if has_template:
        progress("with and without the chat template")
        comparison = compare(
            Condition(llm, "chat template"), Condition(llm, "raw", chat=False), prompt, max_tokens=s.tokens
        )
    return Report(
        prompt=prompt,
        model=_model(llm),
        machine=machine(),
        settings=s,
        made=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        seconds=time.perf_counter() - started,
        trace=traced,
        plan=planned,
        bench=benched,
        quality=quality,
        stability=stable,
        sampled=sampled,
        temperatures=temperatures,
        dialects=dialects,
        comparison=comparison,
        commands=_commands(prompt, s, planned.context, model_argument, middle),
    )


def _stability(llm: LLM, ids: Sequence[int], s: Settings) -> Stability:
    params = SamplingParams(max_tokens=s.tokens)
    runs = [generate(llm, ids, params)[0] for _ in range(3)]
    return Stability(
        runs=len(runs), same=len({run.ids for run in runs}) == 1, tokens=len(runs[0].ids), text=runs[0].text
    )


def _model(llm: LLM) -> Model:
    c, checkpoint = llm.config, llm.checkpoint
    return Model(
        name=llm.name,
        files=tuple(str(getattr(file, "name", file)) for file in checkpoint.files),
        architecture=c.architecture,
        params=checkpoint.params,
        nbytes=checkpoint.nbytes,
        num_layers=c.num_layers,
        hidden=c.hidden,
        intermediate=c.intermediate,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab=c.vocab,
        tied_head=c.tied_head,
        has_template=llm.chat_template is not None,
    )


def _commands(prompt: str, s: Settings, context: int, model: str | None, middle: int) -> dict[str, str]:
    """The command line that makes each part again."""
    quoted, name = shlex.quote(prompt), f" -m {shlex.quote(model)}" if model else ""
    lengths = ",".join(map(str, s.lengths))
    hot = ",".join(f"{t:g}" for t in s.temperatures)
    chain = f"--temperature {s.sampled:g} --top-k {s.top_k} --top-p {s.top_p:g} --seed {s.seed}"
    return {
        "trace": f"cutaway trace {quoted}{name} --attention 0:0 --attention {middle}:0 --lens {LENS_POSITIONS}",
        "plan": f"cutaway kv plan{' ' + shlex.quote(model) if model else ''} --context {context}",
        "bench": f"cutaway kv bench {quoted}{name} --lengths {lengths}",
        "quality": f"cutaway kv quality{name} --prompt {quoted}",
        "greedy": f"cutaway run {quoted}{name} --temperature 0 --max-tokens {s.tokens}",
        "sampled": f"cutaway sample {quoted}{name} {chain} --max-tokens {min(s.tokens, 24)}",
        "temperatures": (
            f"cutaway sample {quoted}{name} --temperatures {hot} --continuations {s.continuations} "
            f"--seed {s.seed} --max-tokens {s.tokens}"
        ),
        "dialects": f"cutaway sample {quoted}{name} --dialects all --temperature 1.5 --top-p 0.9 --min-p 0.05",
        "compare": (
            f"cutaway compare {shlex.quote(model or DEFAULT)} --b template=raw --prompt {quoted} "
            f"--max-tokens {s.tokens}"
        ),
    }
