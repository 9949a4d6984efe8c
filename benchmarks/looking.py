"""What looking costs: the decode rate with every tensor of every step recorded, and with the sampling chain recorded.

The same greedy (and the same seeded) answer is given with and without, in turn; the tokens must be equal. Medians.

    python benchmarks/looking.py --model qwen2.5-coder-0.5b --tokens 64
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import machine

PROMPT = "The capital of France is"
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    from cutaway import LLM

    llm = LLM(options.model, threads=options.threads, max_context=options.tokens + 64)
    print(machine.markdown(machine.describe(options.threads or 2)))
    ids = llm.tokenize(PROMPT)
    common = {"max_tokens": options.tokens, "ignore_eos": True}
    recorded_bytes = 0

    def plain():
        return llm.generate(ids, **common)

    def all_taps():
        nonlocal recorded_bytes
        with llm.tap("*") as recording:
            result = llm.generate(ids, **common)
        recorded_bytes = recording.nbytes
        return result

    def sampled():
        return llm.generate(ids, **common, **SAMPLED)

    def sampled_recorded():
        return llm.generate(ids, record=True, **common, **SAMPLED)

    runs = [plain, all_taps, sampled, sampled_recorded]
    rates: dict[str, list[float]] = {run.__name__: [] for run in runs}
    for number in range(options.rounds + 1):
        results = {run.__name__: run() for run in runs}
        assert results["plain"].token_ids == results["all_taps"].token_ids
        assert results["sampled"].token_ids == results["sampled_recorded"].token_ids
        if number:  # the first round warms up
            for name, result in results.items():
                rates[name].append(result.stats.decode_rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, base in (("all_taps", "plain"), ("sampled_recorded", "sampled")):
        cost = 1 - medians[name] / medians[base]
        print(f"{base:10} {medians[base]:7.1f} tokens/s   {name:17} {medians[name]:7.1f} tokens/s   costs {cost:.1%}")
    print(f"recorded {recorded_bytes / 2**20:.0f} MiB in {options.tokens} tokens")
    if options.output:
        saved = {"model": llm.name, "rates": rates, "medians": medians, "recorded_bytes": recorded_bytes}
        options.output.write_text(json.dumps(saved, indent=2) + "\n")


if __name__ == "__main__":
    main()
