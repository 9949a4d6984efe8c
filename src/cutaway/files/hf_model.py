"""A Hugging Face folder as a model: config.json as a config, the tokenizer's files as a vocabulary, safetensors as
weights.

Both spellings of the rotary settings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`. Read next:
`checkpoint.py`.

Source: transformers' configuration classes of Qwen2, Qwen3 and Llama, and `modeling_rope_utils`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.config import ModelConfig, RopeScaling
from cutaway.errors import FormatError, UnsupportedError
from cutaway.files.fields import Fields, read_json, read_text, shown
from cutaway.files.safetensors import find_safetensors, read_safetensors
from cutaway.files.weights import ARCHITECTURES, check_config, collect, yarn_context
from cutaway.quant import Weight
from cutaway.text.tokenizer import Vocabulary

__all__ = ["Folder"]

QUANTIZED = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "fp8": "FP8", "fbgemm_fp8": "FP8",
             "mxfp4": "MXFP4"}  # fmt: skip


class Folder:
    """The small files of a Hugging Face folder, read once: `config`, `tokenizer` and `generation` settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = Fields(path / "config.json", read_json(path / "config.json"))
        self.tokenizer = self._optional("tokenizer_config.json")
        self.generation = self._optional("generation_config.json")

    def _optional(self, name: str) -> Fields:
        path = self.path / name
        return Fields(path, read_json(path) if path.is_file() else {})

    # -- architecture ----------------------------------------------------------------------------------------------

    def read_config(self) -> ModelConfig:
        """Raises: FormatError (a setting is missing or senseless), UnsupportedError (one asks for what is missing)."""
        c = self.config
        architecture = c.text("model_type")
        if architecture not in ARCHITECTURES:
            raise UnsupportedError(f"{c.path}: model_type", found=architecture, expected=" ".join(ARCHITECTURES))
        self._refuse_quantized()
        c.refuse("hidden_act", ("silu", "swish"))
        c.refuse("partial_rotary_factor", (1, 1.0))
        c.refuse("num_experts", (0,))
        c.refuse("num_local_experts", (0, 1))
        num_layers = c.integer("num_hidden_layers")
        self._refuse_sliding_window(num_layers)
        hidden, num_heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        scaling, theta = self._rope()
        attention_bias = c.flag("attention_bias", False)
        return check_config(
            c.path,
            ModelConfig(
                architecture=architecture,
                vocab=c.integer("vocab_size"),
                hidden=hidden,
                intermediate=c.integer("intermediate_size"),
                num_layers=num_layers,
                num_heads=num_heads,
                num_kv_heads=c.integer("num_key_value_heads", num_heads),
                head_dim=c.integer("head_dim", max(1, hidden // num_heads)),
                max_context=yarn_context(scaling, c.integer("max_position_embeddings")),
                rms_norm_eps=c.number("rms_norm_eps", 1e-6),
                rope_theta=theta,
                rope_scaling=scaling,
                qkv_bias=architecture == "qwen2" or attention_bias,
                o_bias=architecture != "qwen2" and attention_bias,
                mlp_bias=architecture == "llama" and c.flag("mlp_bias", False),
                qk_norm=architecture == "qwen3",
                tied_head=c.flag("tie_word_embeddings", False),
            ),
        )

    def _refuse_quantized(self) -> None:
        """Refuse weights that are stored in a way only their own library reads, by the name of that way."""
        settings = self.config.nested("quantization_config").values
        where = self.config.path
        for name in ("quantize_config.json", "quant_config.json"):  # where older GPTQ and AWQ tools wrote it
            if not settings and (self.path / name).is_file():
                where, settings = self.path / name, read_json(self.path / name)
                settings = {"quant_method": "gptq" if name == "quantize_config.json" else "awq", **settings}
        if not settings:
            return
        method = settings.get("quant_method")
        if method is None and any(settings.get(f"load_in_{bits}bit") is True for bits in (4, 8)):
            method = "bitsandbytes"
        bits = settings.get("bits", settings.get("w_bit"))
        named = QUANTIZED.get(method, method) if isinstance(method, str) else "an unnamed method"
        raise UnsupportedError(
            f"{where}: quantised weights in safetensors are not implemented",
            found=named[:80] + (f" ({bits} bits)" if type(bits) is int and 0 < bits < 100 else ""),
            expected="F32, F16 or BF16 weights",
            hint="a GGUF file of the same model opens, or the folder it was quantised from",
        )

    def _refuse_sliding_window(self, num_layers: int) -> None:
        c = self.config
        kinds = c.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != num_layers:
                raise c.error("layer_types", kinds, f"a list of {num_layers} kinds, one a layer")
            other = [kind for kind in kinds if kind != "full_attention"]
            if other:
                raise UnsupportedError(f"{c.path}: layer_types", found=shown(other[0]), expected="full_attention")
            return
        full_layers = c.get("max_window_layers")  # layers from here on use the window
        windowed = type(full_layers) is not int or full_layers < num_layers
        if windowed and c.flag("use_sliding_window", c.get("model_type") == "llama"):
            c.refuse("sliding_window", why="in use is not implemented")

    def _rope(self) -> tuple[RopeScaling, float]:
        """Scaling and theta from either spelling."""
        c = self.config
        new = c.get("rope_parameters") is not None
        rope = c.nested("rope_parameters" if new else "rope_scaling")
        theta = rope.number("rope_theta", c.number("rope_theta", 10000.0))
        kind, old_kind = rope.get("rope_type"), rope.get("type")
        if kind is not None and old_kind is not None and kind != old_kind:
            raise FormatError(f"{c.path}: rope_type and type differ", found=f"{kind!r} and {old_kind!r}")
        kind = kind if kind is not None else old_kind
        rope.refuse("mrope_section")
        rope.refuse("partial_rotary_factor", (1, 1.0))
        if kind is None and rope.values.keys() - {"rope_theta"}:
            raise FormatError(f"{c.path}: rotary settings without rope_type", found=", ".join(map(repr, rope.values)))
        if kind in (None, "default"):
            return RopeScaling(), theta
        if kind not in ("linear", "llama3", "yarn"):
            expected = "default, linear, llama3 or yarn"
            raise UnsupportedError(f"{c.path}: rope_type", found=repr(kind), expected=expected)
        factor = rope.number("factor")
        if kind == "linear":
            return RopeScaling("linear", factor), theta
        max_context = c.integer("max_position_embeddings")
        original = rope.integer("original_max_position_embeddings", max_context)
        if kind == "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise rope.error("low_freq_factor", low, f"less than high_freq_factor, {high}")
            return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high), theta
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=None if rope.get("attention_factor") is None else rope.number("attention_factor"),
            mscale=rope.number("mscale") if rope.get("mscale") else None,
            mscale_all_dim=rope.number("mscale_all_dim") if rope.get("mscale_all_dim") else None,
            truncate=rope.flag("truncate", True),
        )
        return scaling, theta

    # -- weights ---------------------------------------------------------------------------------------------------

    def read_weights(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, Weight], tuple[Path, ...]]:
        """The weights under our names, as views of the files, and the files.

        The config comes back with `tied_head` as the weights have it: where the settings tie the head and the files
        hold a different one all the same, the head of the files is used.
        """
        stored: dict[str, Weight] = {}
        shards = find_safetensors(self.path)
        for shard, expected in shards.items():
            tensors = read_safetensors(shard)
            for name in expected or ():
                if name not in tensors:
                    raise FormatError(f"{shard}: tensor {name} is missing, and the index says it is here")
            for name in stored.keys() & tensors.keys():
                raise FormatError(f"{shard}: tensor {name} is in another file already")
            stored |= tensors
        head, embed = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
        if config.tied_head and head is not None and embed is not None:
            if head.format == embed.format and np.array_equal(head.data, embed.data):
                del stored["lm_head.weight"]
            else:
                config = replace(config, tied_head=False)
        weights = collect(
            config, stored, self.path, gguf=False, harmless=lambda name: name.endswith("rotary_emb.inv_freq")
        )
        return config, weights, tuple(shards)

    # -- text ------------------------------------------------------------------------------------------------------

    def read_vocabulary(self) -> Vocabulary:
        """Where the tokenizer lies and what its settings say; without a tokenizer.json, `tokenizer_json` is None."""
        path = self.path / "tokenizer.json"
        return Vocabulary(
            kind="hf",
            bos_id=self._token("bos"),
            eos_id=self._token("eos"),
            add_bos=self.tokenizer.flag("add_bos_token", False),
            tokenizer_json=path if path.is_file() else None,
            tokenizer_config=dict(self.tokenizer.values),
        )

    def read_chat_template(self) -> str | None:
        """chat_template.jinja; else the template of tokenizer_config.json (of several, the one named "default")."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return read_text(path)
        template = self.tokenizer.get("chat_template")
        if isinstance(template, list):
            named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
            template = named[0].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise self.tokenizer.error("chat_template", template, "a text")
        return template

    def read_eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence id: generation_config.json's, config.json's and the tokenizer's eos_token."""
        ids = {*_ids(self.generation, "eos_token_id"), *_ids(self.config, "eos_token_id")}
        token = self._token_named("eos")
        return frozenset(ids if token is None else ids | {token})

    def _token(self, kind: str) -> int | None:
        """The id of the bos or eos token: the tokenizer's own, else the first one config.json states."""
        token = self._token_named(kind)
        return token if token is not None else next(iter(_ids(self.config, f"{kind}_token_id")), None)

    def _token_named(self, kind: str) -> int | None:
        """The id of the token that tokenizer_config.json names, if tokenizer.json has such an added token."""
        token = self.tokenizer.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, dict) else token
        return self._added_tokens.get(content) if isinstance(content, str) else None

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        """Content -> id of the added tokens, from tokenizer_config.json or, without reading its vocabulary, from
        tokenizer.json.
        """
        decoder = self.tokenizer.nested("added_tokens_decoder").values
        if decoder:
            added = [
                {**t, "id": int(i)} for i, t in decoder.items() if i.isdecimal() and len(i) < 10 and isinstance(t, dict)
            ]
        else:
            added = self._added_tokens_of_tokenizer()
        entries = [(t.get("content"), t.get("id")) for t in added if isinstance(t, dict)]
        return {content: i for content, i in entries if isinstance(content, str) and type(i) is int}

    def _added_tokens_of_tokenizer(self) -> list[Any]:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            return []
        text = read_text(path)
        key = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
        try:
            return json.JSONDecoder().raw_decode(text, key.end())[0] if key else []
        except (ValueError, RecursionError):
            raise FormatError(f"{path}: added_tokens is not readable as JSON") from None


def _ids(fields: Fields, key: str) -> list[int]:
    """One id, a list of ids, or nothing."""
    value = fields.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i < 1 << 31 for i in ids):
        raise fields.error(key, value, "a token id or a list of them")
    return [i for i in ids if i >= 0]
