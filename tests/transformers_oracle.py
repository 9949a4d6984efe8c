"""What transformers computes with the same dequantised weights, in float32 and in a float64 widened all the way."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny import transformers_model

from cutaway.forward.program import Program
from cutaway.quant import Weight


@dataclass(frozen=True)
class Forward:
    """Tensors of one forward pass over one sequence, by the Program's names: [num_tokens, width]."""

    logits: np.ndarray
    hidden: dict[str, np.ndarray]  # embed, layers.i.residual (all but the last layer), final_norm


def hidden_names(program: Program) -> list[str]:
    """transformers' `hidden_states` in the Program's names. Its last entry comes after the final norm."""
    layers = range(program.config.num_layers)
    return ["embed", *(f"layers.{i}.residual" for i in layers[:-1]), "final_norm"]


def build(program: Program, weights: Mapping[str, Weight], dtype: Any) -> Any:
    """The model in torch.float32, or torch.float64 with the two places widened where transformers stays in float32."""
    model = transformers_model(program, weights, dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(_wide_rms_norm, module)
        model.model.rotary_emb.forward = types.MethodType(_wide_rotary, model.model.rotary_emb)
    return model


def _wide_rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _wide_rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The angle is float32 by definition (models are trained with it); its cosine is not rounded again."""
    angles = (position_ids[..., None].float() * self.inv_freq.float()).double()
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def run(model: Any, program: Program, ids: Any) -> Forward:
    with torch.no_grad():
        out = model(torch.tensor([list(map(int, ids))]), output_hidden_states=True, use_cache=False)
    hidden = {name: state[0].numpy() for name, state in zip(hidden_names(program), out.hidden_states, strict=True)}
    return Forward(out.logits[0].numpy(), hidden)


@contextmanager
def hooked(model: Any, module: str, function: Any) -> Iterator[None]:
    """Replace the output of one module, as a tap's patch does: `function` gets [num_tokens, width]."""

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        patched = torch.from_numpy(function(first[0].numpy().copy())).to(first.dtype)[None]
        return (patched, *output[1:]) if isinstance(output, tuple) else patched

    handle = model.get_submodule(module).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
