"""Save what Hugging Face transformers computes, for `cutaway diff MODEL theirs.npz` (needs torch and transformers).

python examples/dump_transformers.py FOLDER "The capital of France is" theirs.npz
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt, path = sys.argv[1:4]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
with torch.no_grad():
    out = model(ids, output_hidden_states=True)

# L + 1 hidden states: the embedding, the residual after each layer but the last, and the last AFTER the final norm.
states = {f"hidden_states.{i}": state[0].numpy() for i, state in enumerate(out.hidden_states)}
np.savez(path, token_ids=ids[0].numpy(), logits=out.logits[0].numpy(), **states)
