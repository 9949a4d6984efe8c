"""Temperature divides the logits: the same distribution, sharper or flatter."""

import sys

import numpy as np

from cutaway import LLM

llm = LLM(*sys.argv[1:2], max_context=256)
logits = llm.forward(llm.tokenize("My favourite colour is"), last_only=True)[0].astype(float)

for temperature in (0.3, 0.7, 1.0, 1.5):
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    best = np.argsort(-p)[:5]
    entropy = -(p * np.log(p, where=p > 0, out=np.zeros_like(p))).sum()
    shown = "  ".join(f"{llm.detokenize([i])!r} {p[i]:.1%}" for i in best)
    print(f"T = {temperature}: entropy {entropy:5.2f} nats  {shown}")
