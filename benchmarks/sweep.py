"""Speed against context: prefill and decode rates at every depth of a long sequence.

An average over a context hides how fast attention grows; this table shows it row by row, with llama.cpp's column
names (`S_PP`: prefill tokens a second of the next PP tokens at depth N_KV, `S_TG`: decode rate there). `--plot FILE`
draws the curves (matplotlib).

    python benchmarks/sweep.py --llama-python /path/to/python --to 4096 --plot sweep.png

Read next: `engines.py`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from pathlib import Path
from typing import Any

import engines
import machine
from engines import Contender, EngineError


def start(args: argparse.Namespace, path: str) -> tuple[list[Contender], dict[str, str], dict[str, str]]:
    """The engines that could be loaded, their versions, and why others could not."""
    load = {"path": path, "threads": args.threads, "max_context": args.to + args.steps + 64}
    contenders: list[Contender] = []
    versions: dict[str, str] = {}
    failures: dict[str, str] = {}
    if "cutaway" not in args.skip:
        contenders.append(Contender("cutaway", "cutaway", engines.start("cutaway", args)))
    if "llama" not in args.skip:
        worker = engines.start("llama.cpp", args)
        contenders += [
            Contender(f"llama.cpp {word}", "llama.cpp", worker, {"flash": flash})
            for word, flash in (("fa off", False), ("fa on", True))
        ]
    loaded: dict[int, str] = {}
    for one in list(contenders):
        if id(one.worker) not in loaded:
            try:
                loaded[id(one.worker)] = str(one.worker.ask("load", **load)["version"])
            except EngineError as error:
                failures[one.label] = str(error)
                contenders = [other for other in contenders if other.worker is not one.worker]
                continue
        if id(one.worker) in loaded:
            versions[one.label] = loaded[id(one.worker)]
    return contenders, versions, failures


def sweep(contenders: list[Contender], args: argparse.Namespace, ids: list[int]) -> dict[str, list[dict[str, float]]]:
    """Rows of every contender, engines in turn at each depth.

    Each depth is the same sequence grown by `--step` tokens: the worker extends what it holds, so each token is
    computed once. The prefill time is that of the extension alone.
    """
    rows: dict[str, list[dict[str, float]]] = {one.label: [] for one in contenders}
    for depth in range(0, args.to, args.step):
        for one in contenders:
            engines.progress(f"depth {depth}: {one.label}")
            grown = ids[: depth + args.step]
            extended = one.ask("extend", ids=grown, new=args.step)
            answer = one.ask("decode", ids=grown, tokens=args.steps)
            rows[one.label].append(
                {
                    "PP": args.step,
                    "TG": args.steps,
                    "N_KV": depth,
                    "T_PP": extended["seconds"],
                    "S_PP": args.step / extended["seconds"],
                    "T_TG": answer["seconds"],
                    "S_TG": answer["steps"] / answer["seconds"],
                }
            )
    return rows


def render(saved: dict[str, Any]) -> str:
    lines = [machine.markdown(saved["machine"]), "", f"## {saved['model']}", ""]
    for label, rows in saved["rows"].items():
        lines += [f"### {label} ({saved['versions'].get(label, '')})", ""]
        lines.append("| PP | TG | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |")
        lines.append("|---:|---:|---:|---:|---:|---:|---:|")
        for row in rows:
            lines.append(
                f"| {row['PP']} | {row['TG']} | {row['N_KV']} | {row['T_PP']:.3f} | {row['S_PP']:.1f} "
                f"| {row['T_TG']:.3f} | {row['S_TG']:.1f} |"
            )
        lines.append("")
    lines += [f"- not measured: {what}: {reason}" for what, reason in saved["failures"].items()]
    lines.append(f"T_TG and S_TG are measured after the PP tokens, at depth N_KV + PP. {saved['date']}.")
    return "\n".join(lines)


def plot(saved: dict[str, Any], path: str) -> None:
    """Two panels, prefill and decode rate against depth, as PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for panel, key, title in zip(panels, ("S_PP", "S_TG"), ("prefill", "decode"), strict=True):
        for label, rows in saved["rows"].items():
            shift = 0 if key == "S_PP" else rows[0]["PP"] if rows else 0
            panel.plot([row["N_KV"] + shift for row in rows], [row[key] for row in rows], marker="o", label=label)
        panel.set(title=title, xlabel="tokens in the KV cache", ylabel="tokens/s")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{saved['model']}, {saved['machine']['threads']} threads, {saved['machine']['cpu']}")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="speed against context")
    engines.shared_options(parser)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="a catalogue name or a GGUF file")
    parser.add_argument("--to", type=int, default=4096, help="depth to go to")
    parser.add_argument("--step", type=int, default=512, help="tokens between two rows")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded at each depth")
    parser.add_argument("--skip", nargs="+", default=[], choices=["cutaway", "llama"])
    parser.add_argument("--plot", metavar="FILE", help="draw the curves as PNG or SVG")
    args = parser.parse_args()
    path = engines.model_path(args.model)
    described = machine.describe(args.threads)
    text, source = engines.prompt_text(args.text)
    contenders, versions, failures = start(args, path)
    if not contenders:
        raise SystemExit("no engine could be loaded: " + "; ".join(failures.values()))
    ids = contenders[0].worker.ask("tokenize", text=text[:200_000])["ids"]
    ids = list(itertools.islice(itertools.cycle(ids), args.to))
    try:
        rows = sweep(contenders, args, ids)
    finally:
        for worker in {id(one.worker): one.worker for one in contenders}.values():
            worker.close()
    engines.progress("")
    saved = {
        "date": datetime.date.today().isoformat(),
        "model": args.model,
        "machine": described,
        "settings": {"threads": args.threads, "text": source},
        "versions": versions,
        "failures": failures,
        "rows": rows,
    }
    if args.output:
        Path(args.output).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(saved, args.plot)
    print(json.dumps(saved, indent=1) if args.json else render(saved))


if __name__ == "__main__":
    main()
