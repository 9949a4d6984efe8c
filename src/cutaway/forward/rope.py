"""Rotary position embedding: the frequencies, their scalings, and the tables of cosines and sines.

Every interpreter rotates by the same two tables, so this file alone decides what a position means. It knows a config
and no tensor of the Program. Read next: `reference.py`, whose `rope` uses the tables.
"""

from __future__ import annotations

import math

import numpy as np

from cutaway.config import ModelConfig, RopeScaling
from cutaway.errors import UnsupportedError

__all__ = ["attention_factor", "inverse_frequencies", "rope_tables"]


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 to num_positions - 1.

    angle[p, i] = p * inverse_frequency[i];  cos[p, i] = attention_factor * cos(angle[p, i]), and sin likewise.

    Shapes: both [num_positions, head_dim / 2], float32.
    Numerics: the angle is rounded to float32, as every model of this family was trained with; at position 4,000 that
    rounding moves an angle by up to 1e-4, so a "better" angle would be a different model. The cosine itself is exact
    to the last bit of float32.
    """
    positions = np.arange(num_positions, dtype=np.float32)  # [num_positions]
    angles = positions[:, None] * inverse_frequencies(config)  # [num_positions, head_dim / 2]
    wide = angles.astype(np.float64)
    factor = np.float32(attention_factor(config.rope_scaling))
    return np.cos(wide).astype(np.float32) * factor, np.sin(wide).astype(np.float32) * factor


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a position turns pair i: theta^(-2i / head_dim), stretched as `config.rope_scaling` says.

    Shapes: [head_dim / 2] float32.
    Raises: UnsupportedError for a kind of scaling that is not implemented.
    Source: RoFormer arXiv:2104.09864; the scalings: see their functions.
    """
    scaling = config.rope_scaling
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)  # [head_dim / 2]
    # The power is taken in float64 and rounded, so that it is right to the last bit whatever the C library does.
    periods = np.power(np.float64(config.rope_theta), exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / periods  # [head_dim / 2]
    if scaling.kind == "none":
        scaled = plain
    elif scaling.kind == "linear":
        scaled = plain / np.float32(scaling.factor)
    elif scaling.kind == "llama3":
        scaled = plain if scaling.frequency_factors is not None else _llama3(config, plain)
    elif scaling.kind == "yarn":
        scaled = _yarn(config, periods, plain)
    else:
        raise UnsupportedError("rope scaling", found=repr(scaling.kind), expected="none, linear, llama3 or yarn")
    if scaling.frequency_factors is not None:
        scaled = scaled / np.asarray(scaling.frequency_factors, dtype=np.float32)
    return scaled.astype(np.float32)


def attention_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: 1 but for yarn, whose default is 0.1 * ln(factor) + 1.

    With `mscale` and `mscale_all_dim` both given (and not 0), it is (0.1 * mscale * ln(factor) + 1) /
    (0.1 * mscale_all_dim * ln(factor) + 1). Queries and keys are both multiplied, so scores grow by the square.
    Source: YaRN arXiv:2309.00071, section 3.4.
    """
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    stretch = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (stretch * scaling.mscale + 1) / (stretch * scaling.mscale_all_dim + 1)
    return stretch + 1


def _llama3(config: ModelConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: slow pairs are divided by `factor`, fast ones kept, and between the two a blend.

    A pair's wavelength is 2 pi / frequency; it turns original_max_context / wavelength times over the trained context.
    Fewer than low_freq_factor turns: slow. More than high_freq_factor: fast.
    """
    scaling = config.rope_scaling
    trained = np.float32(scaling.original_max_context or config.max_context)
    factor, low = np.float32(scaling.factor), np.float32(scaling.low_freq_factor)
    span = np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    wavelength = np.float32(2 * math.pi) / plain  # [head_dim / 2]
    slow = wavelength > np.float32(trained / scaling.low_freq_factor)
    fast = wavelength < np.float32(trained / scaling.high_freq_factor)
    with np.errstate(divide="ignore", invalid="ignore"):  # span is 0 where no pair lies between
        keep = (trained / wavelength - low) / span
        blend = (np.float32(1) - keep) * plain / factor + keep * plain
    return np.where(slow, plain / factor, np.where(fast, plain, blend))


def _yarn(config: ModelConfig, periods: np.ndarray, plain: np.ndarray) -> np.ndarray:
    """YaRN: pairs that turn more than beta_fast times over the trained context are kept, fewer than beta_slow
    divided by `factor`, and between the two a linear ramp over the pair's index.

    Source: YaRN arXiv:2309.00071, section 3.2.
    """
    scaling = config.rope_scaling
    trained = scaling.original_max_context or config.max_context

    def pair_that_turns(times: float) -> float:
        return config.head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    pairs = np.arange(len(plain), dtype=np.float32)
    keep = np.float32(1) - np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1)  # [head_dim / 2]
    stretched = np.float32(1) / (np.float32(scaling.factor) * periods)
    return stretched * (np.float32(1) - keep) + plain * keep
