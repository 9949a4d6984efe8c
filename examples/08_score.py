"""How expected was each token of a text, and its perplexity."""

import sys

from cutaway import LLM
from cutaway.experiments.score import perplexity, score

llm = LLM(*sys.argv[1:2], max_context=256)
text = "The capital of France is Paris. The capital of France is banana."

for token in score(llm, text).tokens:
    if token.logprob is not None:
        print(f"{token.text!r:14} {token.logprob:8.3f}  rank {token.rank:6,}  expected {token.best_text!r}")
result = perplexity(llm, text, window=128)
print(f"PPL = {result.ppl:.4f} +/- {result.ppl_error:.5f}, {result.bits_per_byte:.3f} bits per byte")
