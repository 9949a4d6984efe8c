"""One word through the model: the shape of every stage, read from the taps. Nothing is recomputed to look."""

import sys

from cutaway import LLM

llm = LLM(*sys.argv[1:2])
ids = llm.tokenize("hello")

with llm.tap(["embed", "layers.*.residual", "final_norm", "logits"]) as recording:
    llm.forward(ids)

print("tokens", ids)
for name in recording.names:
    print(f"{name:22} {recording[name].shape}")
print(len([name for name in recording.names if name.startswith("layers.")]), "layers of the same shape")
