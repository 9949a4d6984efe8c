"""transformers in its own process, on the same file: its own GGUF reader dequantises the weights.

It shares no code with Cutaway (not even the file reader), which is what makes its float32 logits an independent
reference for `quality.py`. Greedy decoding is a bare loop over the model with its own KV cache, faster than
`generate`. See `worker.py` for the protocol.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
import worker

model: Any = None
held: dict[str, Any] = {"ids": None, "cache": None, "next": 0}


def load(path: str, threads: int, dtype: str = "float32", attention: str = "sdpa") -> worker.Answer:
    """Load a GGUF file or a Hugging Face folder."""
    global model
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    file = Path(path)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    if file.is_file():
        model = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, **options)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(str(file), **options)
    model.eval()
    return {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "load_s": time.perf_counter() - start,
    }


def _step(ids: Any, cache: Any) -> tuple[Any, Any]:
    """One forward pass over new tokens; logits of the last only. ids [num_seqs, n] -> next ids [num_seqs, 1]."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


def prefill(ids: list[int]) -> worker.Answer:
    start = time.perf_counter()
    int(_step(torch.tensor([ids]), None)[0])
    return {"seconds": time.perf_counter() - start}


def decode(ids: list[int], tokens: int) -> worker.Answer:
    """`tokens` steps after the prompt. A prompt already held is not computed again; its tail is cut off."""
    if held["ids"] == ids:
        held["cache"].crop(len(ids))
    else:
        held["next"], held["cache"] = _step(torch.tensor([ids]), None)
        held["ids"] = list(ids)
    token, cache = held["next"], held["cache"]
    chosen = [int(token)]
    start = time.perf_counter()
    for _ in range(tokens):
        token, cache = _step(token, cache)
        chosen.append(int(token))
    return {"seconds": time.perf_counter() - start, "steps": tokens, "ids": chosen}


def together(prompts: list[list[int]], tokens: int) -> worker.Answer:
    """Prompts of one length in one batch."""
    token, cache = _step(torch.tensor(prompts), None)
    start = time.perf_counter()
    for _ in range(tokens):
        token, cache = _step(token, cache)
    int(token[0])
    return {"seconds": time.perf_counter() - start, "steps": tokens * len(prompts)}


def logits(ids: list[int], save: str) -> worker.Answer:
    import numpy as np

    rows = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    np.save(save, rows)
    return {"shape": list(rows.shape)}


if __name__ == "__main__":
    worker.serve({"load": load, "prefill": prefill, "decode": decode, "together": together, "logits": logits})
