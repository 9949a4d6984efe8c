"""Attention weights of every head of one layer, for the last token, recomputed from the tapped queries and keys."""

import sys

from cutaway import LLM
from cutaway.experiments.trace import trace

llm = LLM(*sys.argv[1:2], max_context=256)
ids = llm.tokenize("The cat sat on the mat because it was tired")
layer = llm.config.num_layers // 2
result = trace(llm, ids, lens_positions=None, attention=[(layer, None)], attention_rows=[len(ids) - 1])

weights = result.attention[0].weights[:, 0]  # [heads, keys]
for head, row in enumerate(weights):
    top = sorted(enumerate(row[1:], start=1), key=lambda pair: -pair[1])[:3]  # the first token is a sink
    shown = "  ".join(f"{result.texts[at]!r} {weight:.2f}" for at, weight in top)
    print(f"layer {layer} head {head:2}: first token {row[0]:.2f}  {shown}")
