"""Put the rows of `tests/llama_cases.py` through llama.cpp's own samplers and save what is left of each.

Run by hand, with a Python that has llama-cpp-python (no model is needed: a sampler works on an array of logits):

    python tests/oracle/dump_llama_sampling.py

The chain is that of llama.cpp's common/sampling.cpp with its default order, less the samplers that are off there:
logit bias, penalties over the last 64 tokens, top-k, top-p, min-p, temperature, and the draw, which fills in the
probabilities. `data/llama_sampling.npz` then holds, for every case in order:

kept      the ids that are left, a bit each (np.packbits), one case after another, ceil(vocab / 8) bytes for each
shown     up to 32 of them, -1 after the last: the 24 most probable and others at equal steps, int16 [cases, 32]
p         their probabilities, float32 [cases, 32]
sorted    whether llama.cpp left the candidates sorted; then `shown` stands in its order, bool [cases]
checksum  CRC-32 of the row and its settings, uint32 [cases]
version   of llama-cpp-python
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from llama_cases import SAVED, SHOWN, Case, cases

WINDOW = 64  # llama.cpp's default penalty_last_n


def chain(case: Case) -> Any:
    p, vocab = case.settings, len(case.logits)
    made = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    bias = p.get("logit_bias", {})
    biases = (llama_cpp.llama_logit_bias * len(bias))(*bias.items())
    for sampler in (
        llama_cpp.llama_sampler_init_logit_bias(vocab, len(bias), biases),
        llama_cpp.llama_sampler_init_penalties(
            vocab,
            WINDOW,
            p.get("repetition_penalty", 1.0),
            p.get("frequency_penalty", 0.0),
            p.get("presence_penalty", 0.0),
        ),
        llama_cpp.llama_sampler_init_top_k(p.get("top_k", 0)),
        llama_cpp.llama_sampler_init_top_p(p.get("top_p", 1.0), 0),
        llama_cpp.llama_sampler_init_min_p(p.get("min_p", 0.0), 0),
        llama_cpp.llama_sampler_init_temp(p["temperature"]),
        llama_cpp.llama_sampler_init_dist(1),
    ):
        llama_cpp.llama_sampler_chain_add(made, sampler)
    return made


def left(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """ids, logits and probabilities that are left, as they stand in llama.cpp's array, and whether it is sorted."""
    vocab = len(case.logits)
    data = (llama_cpp.llama_token_data * vocab)(*[(i, x, 0.0) for i, x in enumerate(case.logits.tolist())])
    array = llama_cpp.llama_token_data_array(data=data, size=vocab, selected=-1, sorted=False)
    sampler = chain(case)
    for token in case.prompt + case.output:
        llama_cpp.llama_sampler_accept(sampler, token)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    kept = [array.data[place] for place in range(array.size)]
    return (
        np.array([c.id for c in kept]),
        np.array([c.logit for c in kept], np.float32),
        np.array([c.p for c in kept], np.float32),
        bool(array.sorted),
    )


def main() -> None:
    bits, ids_shown, p_shown, in_order, checksums = [], [], [], [], []
    for case in cases():
        ids, logits, p, is_sorted = left(case)
        if case.settings["temperature"] == 0:  # it keeps the others, at -inf
            ids, p = ids[logits > -np.inf], p[logits > -np.inf]
        kept = np.zeros(len(case.logits), bool)
        kept[ids] = True
        bits.append(np.packbits(kept))
        order = np.arange(len(ids)) if is_sorted else np.argsort(-p, kind="stable")
        few = order if len(ids) <= SHOWN else order[np.r_[:24, np.linspace(24, len(ids) - 1, SHOWN - 24).astype(int)]]
        padding = (0, SHOWN - len(few))
        ids_shown.append(np.pad(ids[few], padding, constant_values=-1))
        p_shown.append(np.pad(p[few], padding))
        in_order.append(is_sorted)
        checksums.append(case.checksum)
    SAVED.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        SAVED,
        kept=np.concatenate(bits),
        shown=np.array(ids_shown, np.int16),
        p=np.array(p_shown, np.float32),
        sorted=np.array(in_order),
        checksum=np.array(checksums, np.uint32),
        version=np.array(llama_cpp.__version__),
    )


if __name__ == "__main__":
    main()
