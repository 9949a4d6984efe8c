"""The logit lens: what the model would answer if it stopped after each layer."""

import sys

import numpy as np

from cutaway import LLM
from cutaway.experiments.trace import trace

llm = LLM(*sys.argv[1:2], max_context=512)
result = trace(llm, "The capital of France is", lens_positions=1)
lens = result.lens

for at, state in enumerate(lens.states):
    best, p = result.lens_texts[int(lens.ids[at, 0, 0])], np.exp(lens.logprobs[at, 0, 0])
    print(f"{state:24} {best!r:14} {p:6.1%}   the answer is number {lens.answer_rank[at, 0]}")
