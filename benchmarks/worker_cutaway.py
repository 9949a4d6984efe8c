"""Cutaway in its own process. See `worker.py` for the protocol and `versus.py` for what is asked.

Everything goes through the public Python API, so sampling, stopping and detokenising are inside the measured time.
"""

from __future__ import annotations

import argparse
import time

STARTED = time.perf_counter()

from typing import Any  # noqa: E402

import worker  # noqa: E402

llm: Any = None


def load(path: str, threads: int, max_context: int, activations: str = "int8", kv_type: str = "f16") -> worker.Answer:
    """Load the model; answers with the version and the bytes of weights that one decode step reads."""
    global llm
    import cutaway

    start = time.perf_counter()
    llm = cutaway.LLM(path, threads=threads, max_context=max_context, activations=activations, kv_type=kv_type)
    load_s = time.perf_counter() - start
    return {"version": f"cutaway {cutaway.__version__}", "isa": llm.interpreter.isa, "load_s": load_s}


def describe(path: str) -> worker.Answer:
    """What the file holds: its bytes, parameters, and the bytes of weights one decode step reads.

    Every weight is read once a token, except an embedding table that is not also the head: of that, one row.
    """
    from cutaway.files import checkpoint

    held = checkpoint.load(path)
    table = held.weights["embed.weight"].nbytes if "head.weight" in held.weights else 0
    read = sum(weight.nbytes for weight in held.weights.values()) - table
    formats: dict[str, int] = {}
    for weight in held.weights.values():
        formats[weight.format] = formats.get(weight.format, 0) + weight.nbytes
    return {"nbytes": held.nbytes, "params": held.params, "decode_bytes": read, "formats": formats}


def tokenize(text: str) -> worker.Answer:
    return {"ids": list(llm.tokenize(text))}


def prefill(ids: list[int]) -> worker.Answer:
    """Compute a prompt whose first block was never seen, up to its first new token."""
    answer = _prompt(ids)
    if answer["cached"]:
        raise RuntimeError(f"{answer['cached']} tokens of the prompt were in the prefix cache: nothing fair to time")
    return answer


def _prompt(ids: list[int]) -> worker.Answer:
    start = time.perf_counter()
    result = llm.generate(ids, max_tokens=1, ignore_eos=True, temperature=0.0)
    return {"seconds": time.perf_counter() - start, "cached": result.stats.cached_tokens}


def extend(ids: list[int], new: int) -> worker.Answer:
    """Compute the last `new` ids of a prompt whose earlier ids were computed before and are in the prefix cache."""
    answer = _prompt(ids)
    if answer["cached"] != len(ids) - new:
        raise RuntimeError(f"{answer['cached']} tokens were in the prefix cache, not {len(ids) - new}")
    return answer


def decode(ids: list[int], tokens: int) -> worker.Answer:
    """`tokens` decode steps after the prompt. All that is not prefill counts as decoding."""
    start = time.perf_counter()
    result = llm.generate(ids, max_tokens=tokens + 1, ignore_eos=True, temperature=0.0)
    seconds = time.perf_counter() - start - result.stats.prefill_s
    return {"seconds": seconds, "steps": tokens, "ids": list(result.token_ids), "decode_s": result.stats.decode_s}


def together(prompts: list[list[int]], tokens: int) -> worker.Answer:
    """`tokens` decode steps of several sequences in the same batch, timed once all prompts are computed."""
    from cutaway.engine.sampling import SamplingParams

    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 1, ignore_eos=True)
    sequences = [sequence for ids in prompts for sequence in engine.add(ids, params)]
    while not all(sequence.output_ids for sequence in sequences):
        engine.step()
    before = sum(len(sequence.output_ids) for sequence in sequences)
    start = time.perf_counter()
    while not all(sequence.finished for sequence in sequences):
        engine.step()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "steps": sum(len(sequence.output_ids) for sequence in sequences) - before}


def logits(ids: list[int], save: str) -> worker.Answer:
    """Logits of every position, float32 [num_tokens, vocab], saved as .npy at `save`."""
    import numpy as np

    rows = np.asarray(llm.forward(ids, last_only=False), dtype=np.float32)
    np.save(save, rows)
    return {"shape": list(rows.shape)}


def once(model: str, threads: int, max_context: int, prompt: str) -> worker.Answer:
    import cutaway

    imported = time.perf_counter()
    one = cutaway.LLM(model, threads=threads, max_context=max_context)
    loaded = time.perf_counter()
    one.generate(prompt, max_tokens=1, temperature=0.0)
    return {
        "import_s": imported - STARTED,
        "load_s": loaded - imported,
        "prompt_s": time.perf_counter() - loaded,
        "version": f"cutaway {cutaway.__version__}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a Cutaway worker for the benchmark scripts")
    parser.add_argument("--first-token", nargs=2, metavar=("MODEL", "PROMPT"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-context", type=int, default=4096)
    args = parser.parse_args()
    if args.first_token:
        model, prompt = args.first_token
        worker.first_token(lambda: once(model, args.threads, args.max_context, prompt), STARTED)
    worker.serve(
        {
            "load": load,
            "describe": describe,
            "tokenize": tokenize,
            "prefill": prefill,
            "extend": extend,
            "decode": decode,
            "together": together,
            "logits": logits,
        }
    )


if __name__ == "__main__":
    main()
