"""`cutaway inspect`: what a model's files say, read without loading the weights.

`Inspection` is the result, `document` its view. Read next: `tokenize.py`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.cli.loading import locate
from cutaway.cli.options import JsonFlag, carried_settings, command
from cutaway.cli.screen import show

if TYPE_CHECKING:
    from cutaway.files.checkpoint import Checkpoint
    from cutaway.render.document import Document

__all__ = ["Inspection", "document", "examine", "inspect"]


@dataclass(frozen=True)
class TensorRow:
    """One tensor; `layers` is its layer, or the layers it stands for ("" outside the layers)."""

    name: str
    shape: tuple[int, ...]
    format: str
    params: int
    nbytes: int
    layers: str = ""


@dataclass(frozen=True)
class Inspection:
    """What a model's files say. Parameters count every stored value once: a tied head adds none."""

    name: str
    path: str
    files: list[str]
    architecture: dict[str, Any]
    params: int
    nbytes: int
    tied_head: bool
    kv_bytes_per_token: dict[str, int]  # by type
    context_bytes: dict[str, int]  # of the KV cache in float16, by number of tokens
    eos: dict[int, str]
    bos_id: int | None
    add_bos: bool
    settings: dict[str, Any]  # what the files carry, under their own names
    tensors: list[TensorRow]
    kernels: dict[str, str]  # by format: what multiplies its matrices
    chat_template: str | None


def examine(checkpoint: Checkpoint) -> Inspection:
    """Read a checkpoint's facts. No weight is touched."""
    from cutaway.engine.kv_cache import KV_TYPES, KVCache
    from cutaway.text.tokenizer import Tokenizer

    config, tokenizer = checkpoint.config, Tokenizer(checkpoint.vocabulary)
    scaling = config.rope_scaling
    architecture = {
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "query heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab,
        "trained context": config.max_context,
        "rope theta": config.rope_theta,
        "rope scaling": scaling.kind if scaling.kind == "none" else f"{scaling.kind} x {scaling.factor:g}",
        "RMSNorm epsilon": config.rms_norm_eps,
        "q/k/v bias": config.qkv_bias,
        "q/k norm": config.qk_norm,
    }
    kinds = [kind for kind in KV_TYPES if kind != "q8_0" or config.head_dim % 32 == 0]
    f16 = KVCache.bytes_per_token(config)
    return Inspection(
        name=checkpoint.name,
        path=str(checkpoint.path),
        files=[str(file) for file in checkpoint.files],
        architecture=architecture,
        params=checkpoint.params,
        nbytes=checkpoint.nbytes,
        tied_head=config.tied_head,
        kv_bytes_per_token={kind: KVCache.bytes_per_token(config, kind, kind) for kind in kinds},
        context_bytes={str(n): n * f16 for n in sorted({1024, 4096, config.max_context}) if n <= config.max_context},
        eos={i: tokenizer.token_text(i) for i in sorted(checkpoint.eos_ids)},
        bos_id=checkpoint.bos_id,
        add_bos=checkpoint.add_bos,
        settings=dict(checkpoint.generation),
        tensors=[
            TensorRow(w.name, tuple(w.shape), w.format, w.params, w.nbytes, _layer(w.name))
            for w in checkpoint.weights.values()
        ],
        kernels=_kernels(checkpoint),
        chat_template=checkpoint.chat_template,
    )


def _kernels(checkpoint: Checkpoint) -> dict[str, str]:
    from cutaway.forward.native import kernel_of

    matrices = {w.format for w in checkpoint.weights.values() if len(w.shape) > 1}
    formats = sorted({w.format for w in checkpoint.weights.values()})
    return {name: kernel_of(name) if name in matrices else "vectors, in float32" for name in formats}


def _layer(name: str) -> str:
    found = re.match(r"layers\.(\d+)\.", name)
    return found[1] if found else ""


def by_layer(tensors: list[TensorRow]) -> list[TensorRow]:
    """Fold the tensors that differ only in their layer into one row each: `layers.*.attn.q.weight` of layers 0-23."""
    groups: dict[str, dict[tuple[tuple[int, ...], str], list[TensorRow]]] = {}
    for tensor in tensors:
        kinds = groups.setdefault(re.sub(r"^layers\.\d+\.", "layers.*.", tensor.name), {})
        kinds.setdefault((tensor.shape, tensor.format), []).append(tensor)
    return [
        replace(members[0], name=name, layers=_spans([int(m.layers) for m in members if m.layers]))
        for name, kinds in groups.items()
        for members in kinds.values()
    ]


def _spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; more than three spans are only counted."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts) if len(parts) <= 3 else f"{len(numbers)} of them"


def document(found: Inspection, every_tensor: bool = False) -> Document:
    """The view of an inspection; with `every_tensor` one row a tensor instead of one a kind."""
    from cutaway.render.document import Block, Code, Column, Document, Heading, Table, Text
    from cutaway.render.numbers import size

    a = found.architecture
    head = "tied to the embedding" if found.tied_head else "its own weight (untied)"
    facts: list[tuple[str, Any]] = [
        *a.items(),
        ("output head", head),
        ("parameters", found.params),
        ("weights", size(found.nbytes)),
        ("end-of-sequence ids", ", ".join(f"{i} {text}" for i, text in found.eos.items()) or None),
        ("first token", f"{found.bos_id} (added)" if found.add_bos else "none added"),
    ]
    values = {"f16": "2 B", "f32": "4 B", "q8_0": "(1 + 2/32) B"}
    layers, heads, dim = a["layers"], a["key/value heads"], a["head_dim"]
    kv = [
        (kind, f"2 x {layers} x {heads} x {dim} x {values[kind]}", nbytes, size(nbytes))
        for kind, nbytes in found.kv_bytes_per_token.items()
    ]
    contexts = ", ".join(f"{int(tokens):,} tokens {size(nbytes)}" for tokens, nbytes in found.context_bytes.items())
    formats: dict[str, list[int]] = {}
    for tensor in found.tensors:
        total = formats.setdefault(tensor.format, [0, 0, 0])
        for i, amount in enumerate((1, tensor.params, tensor.nbytes)):
            total[i] += amount
    rows = found.tensors if every_tensor else by_layer(found.tensors)
    blocks: list[Block] = [
        Table([Column("Fact"), Column("Value", wrap=True)], [(key, _text(value)) for key, value in facts]),
        Heading("KV cache"),
        Table(
            ["Type", Column("2 x layers x key/value heads x head_dim x size of a value"), "Bytes a token", "Size"], kv
        ),
        Text(f"In f16: {contexts}."),
        Heading("Formats"),
        Table(
            [
                "Format",
                "Tensors",
                "Parameters",
                Column("Bytes", format="bytes"),
                Column("Bits a weight", format=".2f"),
                Column("Multiplied by", wrap=True),
            ],
            [
                (name, n, params, nbytes, 8 * nbytes / params, found.kernels[name])
                for name, (n, params, nbytes) in sorted(formats.items())
            ],
        ),
        Heading("Tensors"),
        Table(
            [Column("Name"), "Shape", "Format", Column("Bytes each"), "Layers"],
            [(t.name, " x ".join(map(str, t.shape)), t.format, t.nbytes, t.layers) for t in rows],
        ),
        Heading("Settings that the files carry"),
        _settings(found.settings),
        Heading("Chat template"),
        Code(found.chat_template, "jinja") if found.chat_template else Text("None: `run` needs --raw."),
    ]
    return Document(found.name, blocks, subtitle=found.path)


def _text(value: Any) -> str:
    from cutaway.render.numbers import number

    return ("yes" if value else "no") if isinstance(value, bool) else number(value)


def _settings(settings: dict[str, Any]) -> Any:
    from cutaway.render.document import Column, Table, Text

    if not settings:
        return Text("None.")
    used = carried_settings(settings)
    return Table(
        [Column("Setting"), Column("Value", wrap=True)],
        [(name, str(value)) for name, value in settings.items()],
        note=f"Applied only when asked (--settings-from model): {', '.join(used)}." if used else "",
    )


@command
def inspect(
    model: Annotated[str | None, typer.Argument(help="A path, a catalogue name, or a hub id.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="One row a tensor instead of one a kind.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show what a model's files say.

    Architecture, parameters, formats, tensors, KV cache bytes, settings, chat template.
    """
    from cutaway.files import checkpoint

    found = examine(checkpoint.load(locate(model)))
    show(document(found, tensors), found, json)
