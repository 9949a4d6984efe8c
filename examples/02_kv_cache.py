"""The KV cache on and off: the same text to the bit, and the time of each token as the text grows."""

import sys

from cutaway import LLM

model, prompt, tokens = sys.argv[1:2], "The KV cache stores", 64
results = {}
for kv_cache in (True, False):
    llm = LLM(*model, kv_cache=kv_cache, max_context=256)
    results[kv_cache] = llm.generate(prompt, max_tokens=tokens, ignore_eos=True)

on, off = results[True], results[False]
assert on.token_ids == off.token_ids
print(on.text)
print(f"{llm.kv_bytes_per_token:,} bytes of keys and values a token")
print(f"with the cache    {on.stats.decode_rate:6.1f} tokens/s")
print(f"without the cache {off.stats.decode_rate:6.1f} tokens/s")
