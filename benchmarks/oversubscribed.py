"""More threads than cores: how much slower is a step when every core has two of our threads, or a neighbour besides?

Threads of one step meet at barriers; where a core holds two of them, a thread that only spins keeps the other from
arriving. This compares N threads on N cores with 2 N threads on the same cores, in turn, alone and beside one busy
process a core, and prints medians and ratios. Run it on a machine that is otherwise idle, without real-time priority:
that forbids the very changes of thread this is about. Read next: `machine.py`.

    python benchmarks/oversubscribed.py [--model qwen2.5-coder-0.5b] [--cores 2] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import machine

if (source := machine.source_tree()) is not None:
    sys.path.insert(0, str(source))

BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(10000))"


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """`count` processes that do nothing but keep a core busy, as long as the block runs and we live."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(llm: Any, cores: int, rounds: int, prompt: int, tokens: int, busy: list[int]) -> list[dict[str, Any]]:
    """Rates of `cores` and twice as many threads, beside each number of `busy` processes."""
    from cutaway.experiments.tune import threads

    rows = []
    for count in busy:
        with neighbours(count):
            result = threads(llm, [cores, 2 * cores], prompt=prompt, tokens=tokens, rounds=rounds)
        few, many = result.rows
        rows.append(
            {
                "neighbours": count,
                "threads": [few.threads, many.threads],
                "prefill_tokens_s": [few.prefill_tokens_s, many.prefill_tokens_s],
                "decode_tokens_s": [few.decode_tokens_s, many.decode_tokens_s],
                "prefill_ratio": few.prefill_tokens_s / many.prefill_tokens_s,
                "decode_ratio": few.decode_tokens_s / many.decode_tokens_s,
                "decode_samples": [few.decode_samples, many.decode_samples],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="N threads and 2 N threads on N cores")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--cores", type=int, default=machine.physical_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--alone", action="store_true", help="leave out the run beside busy processes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    from cutaway import LLM

    load = os.getloadavg()[0]
    llm = LLM(args.model, max_context=args.prompt + args.tokens)
    busy = [0] if args.alone else [0, args.cores]
    rows = measure(llm, args.cores, args.rounds, args.prompt, args.tokens, busy)
    if args.json:
        print(json.dumps({"model": llm.name, "cores": args.cores, "load_average": load, "rows": rows}, indent=2))
        return
    print(f"{llm.name}, {args.cores} cores, load average before the run {load:.2f}\n")
    print("| busy neighbours | threads | prefill (token/s) | decode (token/s) | times slower |")
    print("|---|---|---|---|---|")
    for row in rows:
        for place, count in enumerate(row["threads"]):
            prefill, decode = row["prefill_tokens_s"][place], row["decode_tokens_s"][place]
            slower = f"prefill {row['prefill_ratio']:.2f}, decode {row['decode_ratio']:.2f}" if place else ""
            print(f"| {row['neighbours']} | {count} | {prefill:.1f} | {decode:.1f} | {slower} |")


if __name__ == "__main__":
    main()
