"""Save what Hugging Face transformers computes, for `cutaway diff MODEL theirs.npz` (needs torch and transformers).

python examples/dump_transformers.py MODEL "The capital of France is" theirs.npz

MODEL is a folder, a hub id, or a .gguf file, whose weights transformers dequantises (needs gguf and accelerate).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, prompt, path = sys.argv[1:4]
where = {"pretrained_model_name_or_path": source}
if source.endswith(".gguf"):
    where = {"pretrained_model_name_or_path": str(Path(source).parent), "gguf_file": Path(source).name}
ids = AutoTokenizer.from_pretrained(**where)(prompt, return_tensors="pt").input_ids
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    out = model(ids, output_hidden_states=True)

# L + 1 hidden states: the embedding, the residual after each layer but the last, and the last AFTER the final norm.
states = {f"hidden_states.{i}": state[0].numpy() for i, state in enumerate(out.hidden_states)}
np.savez(path, token_ids=ids[0].numpy(), logits=out.logits[0].numpy(), **states)
