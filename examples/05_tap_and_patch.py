"""Put what the model thought at one prompt into another: where is the country kept, and when is it read?"""

import sys

from cutaway import LLM

llm = LLM(*sys.argv[1:2], max_context=256)
france, italy = (llm.tokenize(f"The capital of {country} is") for country in ("France", "Italy"))
paris, rome = (llm.tokenizer.encode(city)[0] for city in (" Paris", " Rome"))
country = len(france) - 2  # the country's position: the token before " is"

for layer in range(0, llm.config.num_layers, 3):
    name = f"layers.{layer}.residual"
    with llm.tap(name) as italian:
        llm.forward(italy)

    def patch(x, value=italian[name]):
        x[country] = value[country]
        return x

    with llm.tap([], patch={name: patch}):
        logits = llm.forward(france, last_only=True)[0]
    print(f"after layer {layer:2}: logit of Rome minus Paris {logits[rome] - logits[paris]:+6.2f}")
