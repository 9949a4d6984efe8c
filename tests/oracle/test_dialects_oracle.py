"""The hf dialect against transformers' own logits processors, in float64 on both sides: the same support, the same
probabilities, on random rows."""

from __future__ import annotations

import numpy as np
import pytest

from cutaway.engine.sampling import SamplingParams
from cutaway.engine.stages import Candidates, History

torch = pytest.importorskip("torch")
processors = pytest.importorskip("transformers.generation.logits_process")

VOCAB, ROWS = 500, 1000


def theirs(logits: np.ndarray, ids: list[int], p: SamplingParams) -> np.ndarray:
    """As `generate` orders them: biases, repetition, then (sampling) temperature, top-k, top-p, min-p."""
    chain = []
    if p.logit_bias:
        chain.append(processors.SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in p.logit_bias.items()]))
    if p.repetition_penalty != 1:
        chain.append(processors.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature not in (0, 1):
        chain.append(processors.TemperatureLogitsWarper(p.temperature))
    if p.temperature and p.top_k:
        chain.append(processors.TopKLogitsWarper(p.top_k))
    if p.temperature and p.top_p < 1:
        chain.append(processors.TopPLogitsWarper(p.top_p))
    if p.temperature and p.min_p:
        chain.append(processors.MinPLogitsWarper(p.min_p))
    scores = torch.from_numpy(logits.copy())[None]
    for processor in chain:
        scores = processor(torch.tensor([ids]), scores)
    if p.temperature == 0:
        return np.eye(len(logits))[int(scores.argmax())]
    return torch.softmax(scores, -1)[0].numpy()


def ours(logits: np.ndarray, ids: list[int], p: SamplingParams) -> np.ndarray:
    c = Candidates.of(logits)
    for _, stage in p.chain:
        c = stage(c, History(ids[:3], ids[3:]))
    dense = np.zeros(len(logits))
    dense[c.ids] = c.probabilities
    return dense


def settings(rng: np.random.Generator) -> SamplingParams:
    def maybe(value, off):
        return value if rng.random() < 0.6 else off

    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 2.5])),
        top_k=int(maybe(rng.integers(1, VOCAB + 50), 0)),
        top_p=float(maybe(rng.uniform(0, 1), 1.0)),
        min_p=float(maybe(rng.uniform(0, 0.3), 0.0)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2), 1.0)),
        logit_bias=maybe({int(i): int(rng.integers(-40, 40)) / 8 for i in rng.integers(0, VOCAB, 5)}, {}),
        dialect="hf",
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_hf_dialect_is_transformers(tied):
    rng = np.random.default_rng(11)
    filtered = 0
    for _ in range(ROWS):
        logits = rng.normal(0, rng.uniform(0.5, 4), VOCAB)
        if tied:
            logits = np.round(logits * 2) / 2
        ids = rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()
        params = settings(rng)
        expected, found = theirs(logits, ids, params), ours(logits, ids, params)
        if tied:  # which of equal tokens stays at a border is up to their unstable sort
            expected, found = np.sort(expected), np.sort(found)
        assert np.array_equal(found > 0, expected > 0), params
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-300)
        filtered += bool((expected == 0).any())
    assert filtered > ROWS / 2  # the filters did something


@pytest.mark.parametrize("dialect", ["cutaway", "vllm", "llama.cpp", "mlx"])
def test_the_other_dialects_are_not_transformers(dialect):
    """The oracle can tell them apart: each of the others departs from it on some row."""
    rng = np.random.default_rng(12)
    differing = 0
    for _ in range(200):
        logits = np.round(rng.normal(0, 2, VOCAB) * 2) / 2
        ids = rng.integers(0, VOCAB, 80).tolist()
        params = settings(rng)
        other = SamplingParams(**{**vars_of(params), "dialect": dialect})
        differing += not np.array_equal(ours(logits, ids, other) > 0, theirs(logits, ids, params) > 0)
    assert differing > 10


def vars_of(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
