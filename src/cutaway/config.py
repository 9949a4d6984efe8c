"""ModelConfig: what a model's files say about its architecture.

Built by `files/checkpoint.py` from GGUF keys or from a config.json; read by `forward/decoder.py`. Holds numbers
and rules only: it opens no file and knows no tensor. Read next: `forward/decoder.py`, which turns it into a Program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ModelConfig", "RopeScaling"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context.

    `kind` is "none", "linear", "llama3" or "yarn". Unused fields keep their defaults.
    Source: transformers `modeling_rope_utils`; YaRN arXiv:2309.00071; Llama 3.1 model card.
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_context: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 * ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    frequency_factors: tuple[float, ...] | None = None  # llama3 as GGUF stores it: one divisor a frequency


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder-only model (qwen2, qwen3 or llama)."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (grouped-query attention)."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim
