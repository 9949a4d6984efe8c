"""Fill the measured parts of README.md and README.zh-CN.md, which stand between marker comments.

    python docs/make_readme.py           run: the first command's answer; stats: a `run --stats`; speed: see below
    python docs/make_readme.py speed     only the table, from benchmarks/results/versus.json

The speed table is made from what `benchmarks/versus.py --output benchmarks/results/versus.json` saved.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["fill", "speed"]

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "benchmarks" / "results" / "versus.json"
PROMPT = "用一句话介绍什么是 Transformer。"
UNITS = {"first_token": "s", "resident": "MiB", "peak": "MiB"}  # the others are tokens a second: more is better
WORDS = {
    "README.md": {
        "head": ["model", "measure", "Cutaway", "llama.cpp, its best setting", "ratio", "transformers float32"],
        "decode": "decode, 64 tokens",
        "decode_deep": "decode at depth 4,096",
        "prefill_512": "prefill 512",
        "prefill_2048": "prefill 2,048",
        "together": "8 sequences decoding together",
        "first_token": "process start to first token",
        "resident": "resident memory, context 4,096 filled",
        "peak": "peak memory, the same",
        "foot": "{cpu}, {threads} threads, {bandwidth:.1f} GB/s of read bandwidth at the start; medians of {rounds} "
        "rounds in turn, {date}. {versions}. A ratio above 1 is Cutaway ahead.",
    },
    "README.zh-CN.md": {
        "head": ["模型", "测量项", "Cutaway", "llama.cpp(取其最佳设置)", "比值", "transformers float32"],
        "decode": "解码,64 个 token",
        "decode_deep": "深度 4,096 处解码",
        "prefill_512": "预填充 512",
        "prefill_2048": "预填充 2,048",
        "together": "8 个序列同时解码",
        "first_token": "进程启动到首个 token",
        "resident": "常驻内存,上下文 4,096 填满",
        "peak": "峰值内存,同上",
        "foot": "{cpu},{threads} 线程,开始时实测读带宽 {bandwidth:.1f} GB/s;各引擎轮流运行 {rounds} 轮取中位数,{date}。"
        "{versions}。比值大于 1 表示 Cutaway 领先。",
    },
}


def speed(saved: dict[str, Any], words: dict[str, Any]) -> str:
    """The table of a saved run of versus.py in the words of one README."""
    threads = saved["settings"]["threads"]
    lines = ["| " + " | ".join(words["head"]) + " |", "|---|---|---:|---:|---:|---:|"]
    versions: dict[str, str] = {}
    for model, held in saved["models"].items():
        versions |= {label.split(" ")[0]: version.split(" (SSE")[0] for label, version in held["versions"].items()}
        for key, samples in held["samples"].items():
            unit = UNITS.get(key, "tok/s")
            medians = {label: median(values) for label, values in samples.items() if values}
            peers = [value for label, value in medians.items() if label.startswith("llama.cpp")]
            ours, theirs = medians.get("cutaway"), None
            if peers:
                theirs = min(peers) if key in UNITS else max(peers)
            ratio = None
            if ours and theirs:
                ratio = theirs / ours if key in UNITS else ours / theirs
            slow = medians.get("transformers float32")
            cells = [_amount(value, unit) for value in (ours, theirs)]
            shown = [model, words[key], *cells, f"{ratio:.2f} x" if ratio else "–", _amount(slow, unit)]
            lines.append("| " + " | ".join(shown) + " |")
    foot = words["foot"].format(
        cpu=saved["machine"]["cpu"],
        threads=threads,
        bandwidth=saved["machine"]["read_bandwidth"][str(threads)] / 1e9,
        rounds=saved["settings"]["rounds"],
        date=saved["date"],
        versions=", ".join(versions.values()),
    )
    return "\n".join([*lines, "", foot])


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    digits = 2 if unit == "s" else 0 if value >= 100 or unit == "MiB" else 1
    return f"{value:,.{digits}f} {unit}"


def fill(text: str, part: str, body: str) -> str:
    """`text` with what stands between the markers of `part` replaced by `body`."""
    begin, end = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
    pattern = re.compile(f"({re.escape(begin)}\n).*?({re.escape(end)})", re.DOTALL)
    assert len(pattern.findall(text)) == 1, f"no markers of {part}"
    return pattern.sub(lambda found: f"{found[1]}{body}\n{found[2]}", text)


def run(words: dict[str, Any]) -> str:
    return f"```text\n{_said(PROMPT).stdout.strip()}\n```"


def stats(words: dict[str, Any]) -> str:
    said = _said(PROMPT, "--stats").stderr
    return f"```text\n{said[: said.index('Setting')].strip()}\n```"


def _said(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cutaway", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)


def main() -> None:
    makers: dict[str, Callable[[dict[str, Any]], str]] = {"run": run, "stats": stats}
    if SAVED.exists():
        makers["speed"] = lambda words: speed(json.loads(SAVED.read_text("utf-8")), words)
    for page, words in WORDS.items():
        text = (ROOT / page).read_text("utf-8")
        for part in sys.argv[1:] or makers:
            text = fill(text, part, makers[part](words))
        (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
