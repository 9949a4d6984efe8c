"""Cutaway beside llama.cpp and transformers: the same file, the same prompt ids, in turn within one run.

Prints the machine and its measured ceiling, then for each model a table of medians, ratios and targets; saves every
sample as JSON, which the README's table is made from (`--render FILE` prints a saved run again).

    python benchmarks/versus.py --llama-python /path/to/python --output versus.json

llama.cpp runs with flash attention on and off, and each measure is compared with the better of the two.
Read next: `engines.py`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import machine
from engines import Contender, EngineError

MODELS = ("qwen2.5-coder-0.5b", "smollm2-135m")
DECODE_STEPS = 64
DEPTH = 4096
SEQUENCES = 8
FIRST_PROMPT = "def fibonacci(n):\n    # the n-th Fibonacci number, iteratively\n"


@dataclass(frozen=True)
class Measure:
    """One row of the table. `target` is a ratio to llama.cpp at its best, or an absolute limit in `unit`."""

    key: str
    title: str
    unit: str  # "tok/s": more is better; "s" and "MiB": less is better
    targets: dict[str, float]
    absolute: bool = False

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tok/s"


QWEN, SMOLLM = MODELS
MEASURES = (
    Measure("decode", f"decode, {DECODE_STEPS} tokens, empty context", "tok/s", {QWEN: 1.7, SMOLLM: 1.8}),
    Measure("decode_deep", f"decode at depth {DEPTH:,}", "tok/s", {QWEN: 2.2}),
    Measure("prefill_512", "prefill 512", "tok/s", {QWEN: 2.4, SMOLLM: 2.5}),
    Measure("prefill_2048", "prefill 2,048", "tok/s", {QWEN: 2.6}),
    Measure("together", f"{SEQUENCES} sequences decoding together", "tok/s", {QWEN: 3.0}),
    Measure("first_token", "process start to first token", "s", {QWEN: 0.7}, absolute=True),
    Measure("resident", f"resident memory, context {DEPTH:,} filled", "MiB", {QWEN: 560e6 / 2**20}, absolute=True),
    Measure("peak", f"peak resident memory, context {DEPTH:,} filled", "MiB", {}, absolute=True),
)
TRANSFORMERS_MEASURES = ("decode", "prefill_512", "resident", "peak")


# -- what each measure does ---------------------------------------------------------------------------------------


class Prompts:
    """Prompt ids cut from one text. Every round gets other text, the same for all engines."""

    def __init__(self, ids: list[int]) -> None:
        if len(ids) < DEPTH:
            raise SystemExit(f"the text has {len(ids)} tokens; at least {DEPTH} are needed (--text)")
        self._ids = ids

    def cut(self, length: int, number: int) -> list[int]:
        """`length` ids that start somewhere else for every `number` (the text goes round)."""
        start = (number * 7919 + length) % len(self._ids)
        return list(itertools.islice(itertools.cycle(self._ids), start, start + length))


def _rate(answer: dict[str, Any]) -> float:
    return float(answer["steps"] / answer["seconds"])


def speed_measures(prompts: Prompts) -> dict[str, Callable[[Contender, int], float]]:
    """The measures that loaded workers answer, in tokens a second."""

    def prefill(length: int) -> Callable[[Contender, int], float]:
        return lambda one, number: length / float(one.ask("prefill", ids=prompts.cut(length, number))["seconds"])

    def together(one: Contender, number: int) -> float:
        many = [prompts.cut(64, number * SEQUENCES + s) for s in range(SEQUENCES)]
        return _rate(one.ask("together", prompts=many, tokens=DECODE_STEPS))

    return {
        "decode": lambda one, number: _rate(one.ask("decode", ids=prompts.cut(1, number), tokens=DECODE_STEPS)),
        "prefill_512": prefill(512),
        "prefill_2048": prefill(2048),
        # the same prompt in every round: engines keep it, so that it is computed once
        "decode_deep": lambda one, number: _rate(one.ask("decode", ids=prompts.cut(DEPTH, 0), tokens=DECODE_STEPS)),
        "together": together,
    }


@dataclass(frozen=True)
class Setup:
    """An engine process to start: what to load it with, and the contenders it stands for."""

    name: str
    engine: str
    load: dict[str, Any]
    contenders: tuple[tuple[str, dict[str, Any]], ...]  # (label, parameters of every command)

    def start(self, args: argparse.Namespace) -> list[Contender]:
        worker = engines.start(self.engine, args)
        return [Contender(label, self.engine, worker, params) for label, params in self.contenders]


def setups(path: str, args: argparse.Namespace) -> list[Setup]:
    """Every engine of the run that was not skipped."""
    common = {"path": path, "threads": args.threads}
    room = {"max_context": DEPTH + 2 * DECODE_STEPS}
    flash = (("llama.cpp fa off", {"flash": False}), ("llama.cpp fa on", {"flash": True}))
    found = [
        Setup("cutaway", "cutaway", {**common, **room}, (("cutaway", {}),)),
        Setup("llama.cpp", "llama.cpp", {**common, **room}, flash),
    ]
    for dtype in ("float32", "bfloat16"):
        label = f"transformers {dtype}"
        found.append(Setup(label, "transformers", {**common, "dtype": dtype}, ((label, {}),)))
    skipped = {"llama.cpp" if word == "llama" else word for word in args.skip}
    return [one for one in found if not skipped & {one.engine, one.name.split()[-1]}]


# -- one model ----------------------------------------------------------------------------------------------------


class Run:
    """One model under all engines."""

    def __init__(self, name: str, args: argparse.Namespace, text: str) -> None:
        self.name, self.args = name, args
        self.path = engines.model_path(name)
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.failures: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.about: dict[str, Any] = {}
        self.setups: list[Setup] = []
        self.contenders: list[Contender] = []
        for setup in setups(self.path, args):
            self._start(setup)
        if not self.contenders:
            raise SystemExit("no engine could be loaded: " + "; ".join(self.failures.values()))
        self.prompts = Prompts(self._tokenize(text))

    def _start(self, setup: Setup) -> None:
        """Start and load one engine; one that fails is reported and left out."""
        self._note(f"loading {setup.name}")
        started = setup.start(self.args)
        try:
            answer = started[0].worker.ask("load", **setup.load)
        except EngineError as error:
            self.failures[setup.name] = str(error)
            started[0].worker.close()
            return
        self.versions[setup.name] = f"{answer['version']} ({answer['isa']})"
        self.setups.append(setup)
        self.contenders += started
        if setup.engine == "cutaway":
            try:
                self.about = started[0].worker.ask("describe", path=self.path)
            except EngineError as error:
                self.failures["bytes a token"] = str(error)

    def _tokenize(self, text: str) -> list[int]:
        for one in self.contenders:
            if one.engine != "transformers":
                return list(one.worker.ask("tokenize", text=text[:200_000])["ids"])
        raise SystemExit("Cutaway or llama.cpp is needed to cut the prompts")

    def measure(self, wanted: list[str]) -> Iterator[str]:
        """All wanted measures, each in interleaved rounds. Yields after each, so that it can be saved."""
        for key, function in speed_measures(self.prompts).items():
            if key in wanted:
                self.samples[key] = self._speed(key, function)
                yield key
        self.close()
        if "first_token" in wanted:
            self._first_token()
            yield "first_token"
        if "resident" in wanted or "peak" in wanted:
            self._memory()
            yield "resident"

    def _speed(self, key: str, function: Callable[[Contender, int], float]) -> dict[str, list[float]]:
        """Samples of one measure. transformers takes part in few measures and rounds: it is slow."""
        fast = [one for one in self.contenders if one.engine != "transformers"]
        slow = [one for one in self.contenders if one.engine == "transformers" and key in TRANSFORMERS_MEASURES]

        def note(text: str) -> None:
            self._note(f"{key}: {text}")

        if key != "prefill_2048":  # warm up: touch weights and buffers, compute the prompt that is kept
            engines.in_turn(fast, 1, function, note, first=self.args.rounds)
        samples, failed = engines.in_turn(fast, self.args.rounds, function, note)
        more, failed_too = engines.in_turn(slow, self.args.slow_rounds, function, note)
        for label, reason in {**failed, **failed_too}.items():
            self.failures[f"{key}, {label}"] = reason
        return {**samples, **more}

    def _first_token(self) -> None:
        engines_in_run = [one for one in self.contenders if one.engine != "transformers"]

        def start(one: Contender, number: int) -> float:
            flash = bool(one.params.get("flash"))
            # An untimed start right before each timed one: the file and the libraries are in the page cache, and a
            # virtual machine that gives unused memory back to its host has it again (400 MB back: 0.5 s).
            for _ in range(2):
                answer = engines.first_token_s(one.engine, self.args, self.path, FIRST_PROMPT, flash)
            self.about.setdefault("first_token_parts", {}).setdefault(one.label, []).append(answer)
            return float(answer["seconds"])

        found, failed = engines.in_turn(
            engines_in_run, self.args.rounds, start, lambda text: self._note(f"first token: {text}")
        )
        self.samples["first_token"] = found
        for label, reason in failed.items():
            self.failures[f"first_token, {label}"] = reason

    def _memory(self) -> None:
        """Resident and peak memory of fresh processes once a context of DEPTH tokens is filled."""
        self.samples["resident"], self.samples["peak"] = {}, {}
        for setup in self.setups:
            for index, (label, _) in enumerate(setup.contenders):
                self._note(f"memory: {label}")
                one = setup.start(self.args)[index]
                load = {key: DEPTH if key == "max_context" else value for key, value in setup.load.items()}
                try:
                    one.worker.ask("load", **load)
                    one.ask("decode", ids=self.prompts.cut(DEPTH - DECODE_STEPS, 0), tokens=DECODE_STEPS - 1)
                    held = one.worker.ask("memory")
                    self.samples["resident"][label] = [held["resident"] / 2**20]
                    self.samples["peak"][label] = [held["peak"] / 2**20]
                    self.about.setdefault("memory", {})[label] = held
                except EngineError as error:
                    self.failures[f"memory, {label}"] = str(error)
                finally:
                    one.worker.close()

    def _note(self, text: str) -> None:
        engines.progress(f"{self.name}: {text}")

    def close(self) -> None:
        for worker in {id(one.worker): one.worker for one in self.contenders}.values():
            worker.close()

    def result(self) -> dict[str, Any]:
        return {
            "file_bytes": Path(self.path).stat().st_size,
            "about": self.about,
            "versions": self.versions,
            "failures": self.failures,
            "samples": self.samples,
        }


# -- the table ----------------------------------------------------------------------------------------------------


def summarise(model: str, measure: Measure, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, llama.cpp's better setting, and Cutaway's ratio to it (above 1 is Cutaway ahead, either way round).

    The ratio is the ratio of medians; `ratio_range` holds the least and the greatest ratio of paired rounds.
    """
    medians = {label: statistics.median(values) for label, values in samples.items() if values}
    peers = {label: value for label, value in medians.items() if label.startswith("llama.cpp")}
    summary: dict[str, Any] = {"medians": medians, "target": measure.targets.get(model)}
    if peers:
        pick = max if measure.more_is_better else min
        best = pick(peers, key=lambda label: peers[label])
        summary["best_llama"] = best
        if "cutaway" in medians:
            ours, theirs = samples["cutaway"], samples[best]
            pairs = [a / b if measure.more_is_better else b / a for a, b in zip(ours, theirs, strict=False)]
            a, b = medians["cutaway"], medians[best]
            summary["ratio"] = a / b if measure.more_is_better else b / a
            summary["ratio_range"] = [min(pairs), max(pairs)]
    target = summary["target"]
    if target is not None and "cutaway" in medians:
        if measure.absolute:
            summary["met"] = medians["cutaway"] <= target
        elif "ratio" in summary:
            summary["met"] = summary["ratio"] >= target
    return summary


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return f"{value:.2f}"
    return f"{value:.0f}" if value >= 100 or unit == "MiB" else f"{value:.1f}"


def _target(measure: Measure, summary: dict[str, Any]) -> str:
    if summary["target"] is None:
        return ""
    limit = summary["target"]
    wanted = f"≤ {_number(limit, measure.unit)} {measure.unit}" if measure.absolute else f"≥ {limit:.1f} ×"
    met = summary.get("met")
    return wanted if met is None else f"{wanted} {'met' if met else '**short**'}"


def render(saved: dict[str, Any]) -> str:
    """A saved run as Markdown."""
    lines = ["## The machine", "", machine.markdown(saved["machine"]), ""]
    threads = saved["settings"]["threads"]
    bandwidth = saved["machine"]["read_bandwidth"][str(threads)]
    for model, held in saved["models"].items():
        labels = [label for label in held["versions"] if label != "llama.cpp"]
        lines += [f"## {model}", ""]
        lines += [f"- {label}: {version}" for label, version in held["versions"].items()]
        read = held["about"].get("decode_bytes")
        if read:
            roof = bandwidth / read
            lines.append(
                f"- one decode step reads {read / 1e6:.0f} MB of weights: at {bandwidth / 1e9:.1f} GB/s the roof is "
                f"{roof:.1f} tok/s"
            )
            ours = held["samples"].get("decode", {}).get("cutaway")
            if ours:
                lines.append(f"- Cutaway's decode reaches {statistics.median(ours) / roof:.0%} of that roof")
        others = [label for label in labels if label.startswith("transformers")]
        head = ["measure", "unit", "Cutaway", "llama.cpp, best setting", "ratio (paired rounds)", "target", *others]
        lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for measure in MEASURES:
            if measure.key not in held["samples"]:
                continue
            summary = summarise(model, measure, held["samples"][measure.key])
            medians, best = summary["medians"], summary.get("best_llama")
            theirs = "–" if best is None else f"{_number(medians[best], measure.unit)} ({best.split(' ', 1)[1]})"
            ratio = "–"
            if "ratio" in summary:
                low, high = summary["ratio_range"]
                ratio = f"{summary['ratio']:.2f} × ({low:.2f}–{high:.2f})"
            row = [
                measure.title,
                measure.unit,
                _number(medians.get("cutaway"), measure.unit),
                theirs,
                ratio,
                _target(measure, summary),
                *(_number(medians.get(label), measure.unit) for label in others),
            ]
            lines.append("| " + " | ".join(row) + " |")
        lines.append("")
        lines += [f"- not measured: {what}: {reason}" for what, reason in held["failures"].items()]
    lines.append(
        f"{threads} threads, medians of {saved['settings']['rounds']} interleaved rounds "
        f"(transformers: {saved['settings']['slow_rounds']}), text from {saved['settings']['text']}, {saved['date']}."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cutaway beside llama.cpp and transformers")
    engines.shared_options(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="catalogue names or GGUF files")
    parser.add_argument("--measures", nargs="+", default=[m.key for m in MEASURES], choices=[m.key for m in MEASURES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=2, help="rounds in which transformers takes part")
    parser.add_argument(
        "--skip", nargs="+", default=[], choices=["cutaway", "llama", "transformers", "float32", "bfloat16"]
    )
    parser.add_argument("--render", metavar="FILE", help="print a saved run again and measure nothing")
    args = parser.parse_args()
    if args.render:
        print(render(json.loads(Path(args.render).read_text(encoding="utf-8"))))
        return
    described = machine.describe(args.threads)
    if not args.json:
        print(machine.markdown(described), flush=True)
    text, source = engines.prompt_text(args.text)
    saved: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": described,
        "settings": {
            "threads": args.threads,
            "rounds": args.rounds,
            "slow_rounds": args.slow_rounds,
            "text": source,
            "isa": args.isa,
            "llama_lib": bool(args.llama_lib),
        },
        "models": {},
    }
    for name in args.models:
        run = Run(name, args, text)
        try:
            for _ in run.measure(args.measures):
                saved["models"][Path(name).stem if name.endswith(".gguf") else name] = run.result()
                if args.output:
                    Path(args.output).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
        finally:
            run.close()
            engines.progress("")
    print(json.dumps(saved, indent=1) if args.json else "\n" + render(saved))


if __name__ == "__main__":
    main()
