"""Greedy decoding says the same each time; sampling does not, unless it is seeded."""

import sys

from cutaway import LLM

llm = LLM(*sys.argv[1:2], max_context=256)
prompt = "Once upon a time"

greedy = {llm.generate(prompt, max_tokens=24).text for _ in range(3)}
sampled = {llm.generate(prompt, max_tokens=24, temperature=1.0).text for _ in range(3)}
seeded = {llm.generate(prompt, max_tokens=24, temperature=1.0, seed=7).text for _ in range(3)}
print(f"greedy {len(greedy)}, sampled {len(sampled)}, seeded {len(seeded)} different texts of three")
for text in sampled:
    print("-", text.strip().replace("\n", " "))
