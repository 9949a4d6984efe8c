"""Every tolerance of the tests, with where it comes from. No test has a number of its own.

EPS32 is the spacing of float32 at 1. A bound below is either derived from it, or relative to what a plain float32
computation (transformers) is off on the same input: then both computations are allowed the same kind of error.
"""

from __future__ import annotations

EPS32 = 2.0**-23

# An inverse frequency: one power, one division, at most three more operations for a scaling, each rounded once (half
# an EPS32), in transformers and in ours; torch's vectorised power may be off by one spacing more.
INVERSE_FREQUENCY_RELATIVE = 8 * EPS32

# A cosine of the same float32 angle: ours is rounded once, torch's is off by one spacing of 1 at most, then both are
# multiplied by the attention factor (rounded once more, hence times the factor, which is below 2).
COSINE_ABSOLUTE = 4 * EPS32

# Logits and hidden states against a float64 run of the same weights: no more than this many times what transformers'
# own float32 run is off. Both sum the same products in another order, so the errors have the same size; a wrong
# formula is off by 1e-3 and more, four orders above it.
FLOAT32_TIMES_TRANSFORMERS = 4.0

# A hidden state is allowed that many spacings of the largest value the stream has had so far besides: in the real
# models one value of one row reaches 1,700 by products that nearly cancel, and a float32 run that happens to round that
# value right says nothing of the others. (Of the typical row nothing is allowed besides.)
HIDDEN_ROUNDINGS = 16

# The float64 reference against float64 transformers. They differ in the float32 tables only: a cosine is rounded to
# float32 (EPS32 / 2), so a score moves by EPS32 / 2 relative, and a hidden state by a few of that for each layer.
FLOAT64_RELATIVE_PER_LAYER = 8 * EPS32


# Dot products of float32 in another order: each of n additions rounds once, relative to the sum of absolute products.
def dot_product(length: int) -> float:
    """Times sum |x_k * w_k|: the bound n * EPS32 / 2 for one order, twice for two of them."""
    return length * EPS32


# float16 keys and values: a value is rounded by 2^-11 relative. q8_0: by half a code, 1/254 of the group's largest,
# and its float16 scale by 2^-11.
KV_F16_RELATIVE = 2.0**-11
KV_Q8_0_OF_LARGEST = 0.5 / 127 + 2.0**-11


# Matrix products of the kernels, against the same sum in float64, times the sum of the absolute terms that are added.
# Roundings one after another, half an EPS32 each of a partial sum that is no larger than that sum.
def int8_product(groups: int) -> float:
    """Terms: a group's exact integer dot products times its scales. At most three additions a group (a code's term
    and two minimums), and four roundings of a term itself (its scales multiplied twice, its sum of activations scaled,
    the product where there is no fused multiply-add).
    """
    return (3 * groups + 4) * EPS32 / 2


def float_product(groups: int) -> float:
    """Terms: w * x. A chain of 16 in a group, two chains added, then the groups; a term itself is rounded once."""
    return (16 + 1 + groups + 1) * EPS32 / 2


# exp in the kernels: two spacings relative, for arguments from -87.33 to 88.37; beyond, that of the nearer end.
EXP_RELATIVE = 2 * EPS32
EXP_SMALLEST = 1.2e-38

# RMSNorm against float64: the factor is rounded to float32, then two products are.
RMS_NORM_RELATIVE = 3 * EPS32 / 2

# gate / (1 + e^-gate) * up: exp, one addition, one division, one product. Below -88.37 the quotient stays at
# gate / (1 + e^88.37) instead of falling on, and the smallest results are rounded to multiples of 2^-149.
SILU_RELATIVE = EXP_RELATIVE + 3 * EPS32 / 2
SILU_OF_PRODUCT = 4.2e-39
SUBNORMAL = 2.0**-149


def attention(head_dim: int, keys: int, spans: int) -> tuple[float, float]:
    """(times the largest sum |q_d k_d| / sqrt(head_dim), plus), both times sum_j p_j |v_j|.

    A score sums head_dim terms (twice rounded without fused multiply-add; q8_0 adds a product for each 32) and is
    scaled; the error of a score is the relative error of its weight, above and below the fraction. Then the weights:
    exp twice (in its span, and the span's), the sum of the weights, the sum of the weighted values, the spans, the
    division. A key far below the others keeps a weight of EXP_SMALLEST.
    """
    return 2 * (head_dim + 4) * EPS32, 2 * (2 * EXP_RELATIVE + (keys + 2 * spans + 4) * EPS32 / 2)


# Gradients in float32 against transformers' in float32, by the norm of a weight's gradient: the same sums in another
# order, forward and back through the layers. A wrong formula is off by 1e-2 and more.
GRADIENT_RELATIVE = 1e-5
