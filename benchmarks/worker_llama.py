"""llama.cpp in its own process, through the C API that llama-cpp-python binds.

The C API is called directly rather than through the high-level `Llama` class, so nothing but `llama_decode` and an
argmax stands between the engine and the clock: the setting most favourable to it. Batch sizes are its own defaults
(2,048 logical, 512 physical), the KV cache is float16. `flash` picks flash attention; contexts are made as asked and
kept. See `worker.py` for the protocol.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time

STARTED = time.perf_counter()

from typing import Any  # noqa: E402

import llama_cpp.llama_cpp as api  # noqa: E402
import numpy as np  # noqa: E402
import worker  # noqa: E402

BATCH, MICRO_BATCH = 2048, 512


@api.llama_log_callback
def _quiet(level: int, text: bytes, user_data: Any) -> None:
    """Swallow the library's log."""


class Context:
    """One llama_context: a KV cache and its settings. Remembers what sequence 0 holds so that it can be reused."""

    def __init__(self, model: Any, threads: int, max_context: int, sequences: int, flash: bool) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = max_context * sequences
        params.n_batch = BATCH
        params.n_ubatch = MICRO_BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        params.no_perf = True
        self.handle = api.llama_init_from_model(model, params)
        if not self.handle:
            raise RuntimeError("llama_init_from_model failed")
        self.memory = api.llama_get_memory(self.handle)
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.held: list[int] = []  # the prompt sequence 0 holds, and the token that follows it
        self.next = -1

    def close(self) -> None:
        api.llama_batch_free(self.batch)
        api.llama_free(self.handle)

    def run(self, tokens: list[tuple[int, int, int]], outputs: str) -> None:
        """Decode (token, position, sequence) triples; `outputs`: "last" or "all" rows get logits."""
        batch = self.batch
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = outputs == "all"
        batch.logits[len(tokens) - 1] = 1
        batch.n_tokens = len(tokens)
        status = api.llama_decode(self.handle, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")

    def row(self, index: int) -> np.ndarray:
        """Logits [vocab] of batch row `index` (-1: the last), a view."""
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self.handle, index), shape=(self.vocab,))

    def prompt(self, ids: list[int], sequence: int = 0) -> int:
        """Compute a prompt in an empty sequence, give back the most likely next token."""
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            self.run([(token, start + i, sequence) for i, token in enumerate(part)], "last")
        return int(self.row(-1).argmax())

    def clear(self) -> None:
        api.llama_memory_clear(self.memory, True)
        self.held = []


class State:
    """The loaded model and the contexts made for it."""

    def __init__(self) -> None:
        self.model: Any = None
        self.vocab: Any = None
        self.threads = 2
        self.max_context = 4096
        self.contexts: dict[tuple[int, int, bool], Context] = {}

    def context(self, flash: bool, sequences: int = 1, max_context: int | None = None) -> Context:
        key = (max_context or self.max_context, sequences, flash)
        if key not in self.contexts:
            self.contexts[key] = Context(self.model, self.threads, key[0], sequences, flash)
        return self.contexts[key]


state = State()


def load(path: str, threads: int, max_context: int) -> worker.Answer:
    start = time.perf_counter()
    api.llama_log_set(_quiet, ctypes.c_void_p(0))
    api.llama_backend_init()
    state.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    if not state.model:
        raise RuntimeError(f"llama.cpp could not load {path}")
    state.vocab = api.llama_model_get_vocab(state.model)
    state.threads, state.max_context = threads, max_context
    info = api.llama_print_system_info().decode()  # "CPU : AVX2 = 1 | FMA = 1 | ..."
    import llama_cpp

    return {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "isa": " ".join(re.findall(r"(\w+) = 1", info)),
        "load_s": time.perf_counter() - start,
    }


def tokenize(text: str) -> worker.Answer:
    data = text.encode()
    room = (api.llama_token * (len(data) + 8))()
    count = api.llama_tokenize(state.vocab, data, len(data), room, len(room), True, False)
    return {"ids": list(room[:count])}


def prefill(ids: list[int], flash: bool) -> worker.Answer:
    context = state.context(flash)
    context.clear()
    start = time.perf_counter()
    context.prompt(ids)
    return {"seconds": time.perf_counter() - start}


def extend(ids: list[int], new: int, flash: bool) -> worker.Answer:
    """Compute the last `new` ids of a prompt whose earlier ids are held; anything after them is cut off."""
    context = state.context(flash)
    kept = len(ids) - new
    if context.held != ids[:kept]:
        raise RuntimeError("the earlier ids are not the ones held")
    api.llama_memory_seq_rm(context.memory, 0, kept, -1)
    start = time.perf_counter()
    for first in range(kept, len(ids), BATCH):
        part = ids[first : first + BATCH]
        context.run([(token, first + i, 0) for i, token in enumerate(part)], "last")
    context.next = int(context.row(-1).argmax())
    context.held = list(ids)
    return {"seconds": time.perf_counter() - start, "cached": kept}


def decode(ids: list[int], tokens: int, flash: bool) -> worker.Answer:
    """`tokens` steps after the prompt. A prompt already held is not computed again; its tail is cut off."""
    context = state.context(flash)
    if context.held == ids:
        api.llama_memory_seq_rm(context.memory, 0, len(ids), -1)
    else:
        context.clear()
        context.next = context.prompt(ids)
        context.held = list(ids)
    token = context.next
    chosen = [token]
    start = time.perf_counter()
    for position in range(len(ids), len(ids) + tokens):
        context.run([(token, position, 0)], "last")
        token = int(context.row(-1).argmax())
        chosen.append(token)
    return {"seconds": time.perf_counter() - start, "steps": tokens, "ids": chosen}


def together(prompts: list[list[int]], tokens: int, flash: bool) -> worker.Answer:
    room = max(len(ids) for ids in prompts) + tokens + 1
    context = state.context(flash, len(prompts), (room + 255) // 256 * 256)
    context.clear()
    current = [context.prompt(ids, sequence) for sequence, ids in enumerate(prompts)]
    start = time.perf_counter()
    for step in range(tokens):
        context.run([(token, len(prompts[s]) + step, s) for s, token in enumerate(current)], "all")
        current = [int(context.row(s).argmax()) for s in range(len(prompts))]
    return {"seconds": time.perf_counter() - start, "steps": tokens * len(prompts)}


def logits(ids: list[int], save: str, flash: bool) -> worker.Answer:
    context = state.context(flash)
    context.clear()
    rows = np.empty((len(ids), context.vocab), dtype=np.float32)
    for start in range(0, len(ids), MICRO_BATCH):
        part = ids[start : start + MICRO_BATCH]
        context.run([(token, start + i, 0) for i, token in enumerate(part)], "all")
        for i in range(len(part)):
            rows[start + i] = context.row(i)
    np.save(save, rows)
    return {"shape": list(rows.shape)}


def once(model: str, threads: int, max_context: int, prompt: str, flash: bool) -> worker.Answer:
    imported = time.perf_counter()
    version = load(model, threads, max_context)["version"]
    context = state.context(flash)
    loaded = time.perf_counter()
    context.prompt(tokenize(prompt)["ids"])
    return {
        "import_s": imported - STARTED,
        "load_s": loaded - imported,
        "prompt_s": time.perf_counter() - loaded,
        "version": version,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a llama.cpp worker for the benchmark scripts")
    parser.add_argument("--first-token", nargs=2, metavar=("MODEL", "PROMPT"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-context", type=int, default=4096)
    parser.add_argument("--flash", action="store_true")
    args = parser.parse_args()
    if args.first_token:
        model, prompt = args.first_token
        worker.first_token(lambda: once(model, args.threads, args.max_context, prompt, args.flash), STARTED)
    worker.serve(
        {
            "load": load,
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
