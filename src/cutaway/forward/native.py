"""The native interpreter: a Program compiled once into phases of C++ kernels, a step being one call without the GIL.

Compiling rewrites the Program: `fusion.py` makes phases of operations (norm + quantise + q/k/v, gate/up + SiLU, head
norms + RoPE + attention, projection + residual). A fused phase computes exactly what its operations compute one by one.
Buffers are planned from the lifetimes of the tensors. Only this file imports the extension.
Read next: `native/plan.h`.
"""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway import _native
from cutaway.config import ModelConfig
from cutaway.errors import KernelError
from cutaway.forward.fusion import fused
from cutaway.forward.program import Batch, Op, Program, TopLogits, refuse_unknown
from cutaway.forward.rope import rope_tables
from cutaway.forward.taps import Taps
from cutaway.quant import Weight

__all__ = ["NativeProgram", "isas", "kernel_of", "read_bandwidth", "usable_cores"]


# Operations there are kernels for, with the attributes they take.
_KINDS: dict[str, dict[str, tuple[()]]] = {
    kind: {}
    for kind in (["embed", "rms_norm", "linear", "head_norm", "rope", "attention", "silu_mul", "add", "select_rows"])
}

_KV_DTYPES = {"f16": np.float16, "f32": np.float32, "q8_0": np.int8}


def isas() -> list[str]:
    """Instruction sets the kernels can use on this processor, best first."""
    return list(_native.isas())


def usable_cores() -> int:
    """Physical cores within this process's affinity and cgroup quota: the default number of threads."""
    return int(_native.usable_cores())


def read_bandwidth(threads: int, nbytes: int = 1 << 28, repeats: int = 8) -> float:
    """Bytes a second that `threads` threads together read from memory (best of `repeats` passes)."""
    return float(_native.read_bandwidth(threads, nbytes, repeats))


def kernel_of(weight_format: str, activations: str = "int8") -> str:
    """How a matrix of this format is multiplied: "panel kernel, int8 activations", or "... float32 activations".

    "no kernel" where the format cannot be packed. An embedding's rows are looked up, whatever their format.
    """
    if not _native.packed_bytes(weight_format, 8, 256):
        return "no kernel"
    rounded = activations == "int8" and weight_format not in ("F32", "F16", "BF16")
    return f"panel kernel, {'int8' if rounded else 'float32'} activations"


@dataclass(frozen=True)
class _Phase:
    """Operations done by one native phase, and the buffers of the tensors that exist once it is over."""

    ops: tuple[str, ...]
    tensors: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _Compiled:
    plan: _native.Plan
    phases: list[_Phase]
    stored: int  # phases after which all keys and values are stored
    head: int  # index of the first phase that works on output rows
    logits: int  # buffer of the logits


class NativeProgram:
    """Runs a Program with the C++ kernels.

    `activations`: "int8" multiplies quantised weights by activations quantised in groups of 32 (float weights always
    meet float32 activations); "f32" rounds nothing. `threads`: None means `usable_cores()`. `max_context` bounds
    positions. `fuse=False` gives every operation a phase of its own: the same bits, slower. `isa`: None means the
    environment variable CUTAWAY_ISA, or the best this processor has.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        *,
        activations: str = "int8",
        threads: int | None = None,
        max_context: int = 4096,
        fuse: bool = True,
        isa: str | None = None,
    ) -> None:
        if activations not in ("int8", "f32"):
            raise KernelError("unknown activations", found=repr(activations), expected="'int8' or 'f32'")
        refuse_unknown(program, "the native interpreter", _KINDS)
        config = program.config
        if config.head_dim % 8 or config.head_dim > 256:
            raise KernelError(
                "the kernels need heads of whole vectors",
                found=f"head_dim {config.head_dim}",
                expected="a multiple of 8, at most 256",
            )
        isa = isa or os.environ.get("CUTAWAY_ISA") or isas()[0]
        if isa not in isas():
            raise KernelError(
                "instruction set is not available",
                found=repr(isa),
                expected=" or ".join(isas()),
                hint="unset CUTAWAY_ISA",
            )
        self.program, self.activations, self.isa = program, activations, isa
        self.fuse, self.max_context = fuse, max_context
        if threads is not None and threads < 1:
            raise KernelError("threads", found=threads, expected="at least 1")
        self.threads = threads or usable_cores()
        self._pool = _native.Pool(self.threads)
        self._cos, self._sin = (np.ascontiguousarray(table) for table in rope_tables(config, max_context))
        self._vectors: dict[str, np.ndarray] = {}
        self._packed: dict[str, _native.Packed] = {}
        self._weights = weights
        self._embedding = weights["embed.weight"]
        self._compiled: dict[frozenset[str], _Compiled] = {}
        self._last: _Compiled | None = None
        self._pack()

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed weight matrices (the embedding table stays in its file)."""
        return sum(packed.nbytes for packed in self._packed.values())

    @property
    def packed_sizes(self) -> dict[str, int]:
        """Bytes of each packed weight matrix, by name."""
        return {name: packed.nbytes for name, packed in self._packed.items()}

    @property
    def head_rows_finished(self) -> int:
        """Rows of the output head that the last run's screening computed in full; 0 where it did not screen."""
        return 0 if self._last is None else int(self._last.plan.head_rows_finished)

    def with_threads(self, threads: int) -> NativeProgram:
        """The same program over the same packed weights (shared, not copied), run by another number of threads."""
        if threads < 1:
            raise KernelError("threads", found=threads, expected="at least 1")
        other = copy.copy(self)
        other.threads, other._pool = threads, _native.Pool(threads)
        other._compiled, other._last = {}, None
        return other

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of activations and scratch memory allocated so far."""
        return sum(compiled.plan.scratch_bytes for compiled in self._compiled.values())

    def run(
        self, batch: Batch, kv_cache: object, taps: Taps | None = None, *, profile: bool = False
    ) -> np.ndarray | TopLogits:
        """One step: logits float32 [num_outputs, vocab], or the largest of each row when `batch.head_top_k` is set.

        Raises KernelError for a batch that does not fit the model, the KV cache or `max_context`.
        """
        compiled = self._compile(taps.names if taps else frozenset())
        plan, self._last = compiled.plan, compiled
        top_k, vocab = batch.head_top_k or 0, self.program.config.vocab
        if batch.head_top_k is not None and not 1 <= top_k <= vocab:
            raise KernelError("head_top_k", found=batch.head_top_k, expected=f"1 to {vocab}")
        self._bind(plan, kv_cache)
        try:
            plan.begin(
                batch.token_ids,
                batch.positions,
                batch.slots,
                batch.query_starts,
                batch.context_lengths,
                batch.block_tables,
                batch.output_rows,
                top_k,
            )
        except ValueError as error:
            raise KernelError(str(error)) from None
        except TypeError:
            raise KernelError("batch: arrays must be contiguous int32, block_tables [num_seqs, max_blocks]") from None
        outputs = len(batch.output_rows)
        end = len(compiled.phases) - (0 if top_k else 1) if outputs else compiled.head
        if taps is None and not outputs:  # a part of a prompt: what comes after its last keys and values is for nobody
            plan.run(0, compiled.stored, profile, store_only=True)
        elif taps is None:
            plan.run(0, end, profile)
        else:
            self._run_tapped(compiled, end, batch, taps, profile)
        if not outputs:
            return np.empty((0, vocab), np.float32)
        if top_k:
            ids, values = plan.top(top_k)
            return TopLogits(ids, values)
        return np.array(plan.view(compiled.logits))

    def times(self) -> list[tuple[tuple[str, ...], float]]:
        """(names of the operations, nanoseconds) of each phase of the last run with `profile=True`."""
        if self._last is None:
            return []
        return [(phase.ops, ns) for phase, ns in zip(self._last.phases, self._last.plan.times(), strict=True)]

    # -- running -----------------------------------------------------------------------------------------------------

    def _run_tapped(self, compiled: _Compiled, end: int, batch: Batch, taps: Taps, profile: bool) -> None:
        taps.begin(batch)
        done = 0
        for index, phase in enumerate(compiled.phases[:end]):
            tapped = [(name, buffer) for name, buffer in phase.tensors if name in taps.names]
            if not tapped:
                continue
            compiled.plan.run(done, index + 1, profile)
            done = index + 1
            for name, buffer in tapped:
                view = compiled.plan.view(buffer)
                replacement = taps.visit(name, view)
                if replacement is not None:
                    view[...] = replacement
        if done < end:
            compiled.plan.run(done, end, profile)

    def _bind(self, plan: _native.Plan, kv: object) -> None:
        if getattr(plan, "bound", None) is kv:
            return
        _check_kv(kv, self.program.config)
        plan.bind_kv(kv.k, kv.v, kv.k_scale, kv.v_scale, kv.k_type, kv.v_type)  # type: ignore[attr-defined]
        plan.bound = kv

    # -- compiling ---------------------------------------------------------------------------------------------------

    def _pack(self) -> None:
        """Weight matrices into panels, all in one native call; biases and norms to float32."""
        for op in self.program:
            vectors = op.weights[1:] if op.kind == "linear" else () if op.kind == "embed" else op.weights
            for name in vectors:
                self._vectors[name] = np.ascontiguousarray(self._weights[name].dequantize(), np.float32).reshape(-1)
        names = list(dict.fromkeys(op.weights[0] for op in self.program if op.kind == "linear"))
        matrices = [self._weights[name] for name in names]
        data = [np.ascontiguousarray(weight.data) for weight in matrices]
        screened = self.activations == "int8" and self.fuse
        arena = _native.Arena(sum(_native.packed_bytes(weight.format, *weight.shape) for weight in matrices))
        packed = _native.pack_all(
            [weight.format for weight in matrices],
            data,
            [weight.shape[1] for weight in matrices],
            [_is_mapped(array) for array in data],
            names.index(self.program["logits"].weights[0]) if screened else -1,
            self.isa,
            self._pool,
            arena,
        )
        self._packed = dict(zip(names, packed, strict=True))

    def _compile(self, tapped: frozenset[str]) -> _Compiled:
        if tapped not in self._compiled:
            self._compiled[tapped] = _Compiler(self, tapped).compile()
        return self._compiled[tapped]


def _check_kv(kv: Any, config: ModelConfig) -> None:
    """Raises KernelError where the arrays of a KV cache are not what the kernels will read and write."""
    size, dim, kinds = kv.block_size, config.head_dim, {"k": kv.k_type, "v": kv.v_type}
    if size % 8:
        raise KernelError("KV cache: blocks of whole vectors", found=f"block_size {size}", expected="a multiple of 8")
    for kind in kinds.values():
        if kind not in _KV_DTYPES:
            raise KernelError("KV cache: unknown type", found=repr(kind), expected=", ".join(_KV_DTYPES))
        if kind == "q8_0" and dim % 32:
            raise KernelError("KV cache: q8_0", found=f"head_dim {dim}", expected="a multiple of 32", hint="f16 or f32")
    blocks = len(kv.k[0]) if kv.k else 0
    tails = {"k": (dim, size), "v": (size, dim), "k_scale": (dim // 32, size), "v_scale": (size, dim // 32)}
    for name, tail in tails.items():
        kind, scales = kinds[name[0]], name.endswith("_scale")
        if scales and kind != "q8_0":
            continue
        shape, dtype = (blocks, config.num_kv_heads, *tail), np.dtype(np.float16 if scales else _KV_DTYPES[kind])
        arrays = getattr(kv, name)
        if len(arrays) != config.num_layers:
            raise KernelError(f"KV cache: layers of {name}", found=len(arrays), expected=config.num_layers)
        for array in arrays:
            whole = array.flags.c_contiguous and array.flags.writeable
            if array.shape != shape or array.dtype != dtype or not whole:
                found, expected = f"{array.dtype} {array.shape}", f"{dtype} {shape}, contiguous and writable"
                raise KernelError(f"KV cache: {name}", found=found, expected=expected)


def _is_mapped(data: np.ndarray) -> bool:
    """True when the array's bytes are a read-only memory map, whose pages come back from the file."""
    base: object = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return isinstance(base, mmap.mmap) and not data.flags.writeable


class _Compiler:
    """Lays out the phases of one plan. `tapped` names must exist as tensors between phases."""

    def __init__(self, native: NativeProgram, tapped: frozenset[str]) -> None:
        self.native, self.tapped, self.program = native, tapped, native.program
        config = self.program.config
        self.plan = _native.Plan(
            native.isa,
            native._pool,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_layers,
            config.rms_norm_eps,
            native.activations == "int8",
        )
        embedding = native._embedding
        self.plan.embedding(embedding.format, np.ascontiguousarray(embedding.data), embedding.shape[1])
        self.plan.rope_tables(native._cos, native._sin)
        self.phases: list[_Phase] = []
        self.buffers: dict[str, int] = {}
        self.free: dict[tuple[int, bool], list[int]] = {}
        self.groups = fused(self.program, tapped) if native.fuse else [[op] for op in self.program]
        self.last_use = {name: i for i, group in enumerate(self.groups) for op in group for name in op.inputs}

    def compile(self) -> _Compiled:
        for index, group in enumerate(self.groups):
            self._emit(index, group)
        logits = self.buffers["logits"]
        head = next(i for i, phase in enumerate(self.phases) if phase.ops[0] == "outputs")
        attention = [i for i, group in enumerate(self.groups) if group[-1].kind == "attention"]
        self.plan.top_head(logits, self.program.config.vocab)
        self.phases.append(_Phase(("top_logits",), ()))
        return _Compiled(self.plan, self.phases, attention[-1] + 1, head, logits)

    # -- one phase ---------------------------------------------------------------------------------------------------

    def _take(self, op: Op, over: str | None = None, index: int = -1) -> int:
        """A buffer for the tensor of `op`; that of tensor `over` where nobody reads it after phase `index`."""
        key = (op.width, op.rows == "num_outputs")
        if over is not None and self.last_use.get(over) == index:
            self.buffers[op.name] = self.buffers.pop(over)
        else:
            free = self.free.setdefault(key, [])
            self.buffers[op.name] = free.pop() if free else self.plan.buffer(*key)
        return self.buffers[op.name]

    def _emit(self, index: int, group: list[Op]) -> None:
        made: list[tuple[str, int]] = []
        kinds = [op.kind for op in group]
        if "linear" in kinds:
            made = self._emit_matmul(index, group)
        elif kinds[-1] == "attention":
            made = self._emit_attention(group)
        elif kinds == ["embed"]:
            out = self._take(group[0])
            self.plan.embed(out)
            made = [(group[0].name, out)]
        else:
            op = group[0]
            inputs = [self.buffers[name] for name in op.inputs]
            out = self._take(op)
            weight = self.native._vectors[op.weights[0]] if op.weights else None
            second = inputs[1] if len(inputs) > 1 else -1
            self.plan.rows(op.kind, inputs[0], second, out, weight, op.rows == "num_outputs")
            made = [(op.name, out)]
        self.phases.append(_Phase(tuple(op.name for op in group), tuple(made)))
        for op in group:
            for name in set(op.inputs):
                if self.last_use[name] == index and name in self.buffers:
                    width, outputs = self.program[name].width, self.program[name].rows == "num_outputs"
                    self.free.setdefault((width, outputs), []).append(self.buffers.pop(name))

    def _emit_matmul(self, index: int, group: list[Op]) -> list[tuple[str, int]]:
        linears = [op for op in group if op.kind == "linear"]
        norm = group[0] if group[0].kind == "rms_norm" else None
        last = group[-1]
        source = self.buffers[(norm or linears[0]).inputs[0]]
        residual, silu_out = -1, -1
        if last.kind == "add":  # in place over the residual stream where that ends here
            residual = self.buffers[last.inputs[0]]
            outs = [self._take(last, over=last.inputs[0], index=index)]
            made = [(last.name, outs[0])]
        else:
            outs = [self._take(op) for op in linears]
            made = [(op.name, out) for op, out in zip(linears, outs, strict=True)]
            if last.kind == "silu_mul":
                silu_out = self._take(last, over=last.inputs[0], index=index)
                made = [(last.name, silu_out)]
        biases = [self.native._vectors[op.weights[1]] if len(op.weights) > 1 else None for op in linears]
        self.plan.matmul(
            source,
            [self.native._packed[op.weights[0]] for op in linears],
            biases,
            outs,
            residual,
            self.native._vectors[norm.weights[0]] if norm else None,
            silu_out,
            linears[0].rows == "num_outputs",
        )
        return made

    def _emit_attention(self, group: list[Op]) -> list[tuple[str, int]]:
        op = group[-1]
        norms = [self.native._vectors[o.weights[0]] for o in group if o.kind == "head_norm"]
        names = list(op.inputs)
        for before in reversed(group[:-1]):  # back to the tensors the fused phase starts from
            names = [before.inputs[0] if name == before.name else name for name in names]
        q, k, v = (self.buffers[name] for name in names)
        out = self._take(op)
        assert op.layer is not None
        self.plan.attention(op.layer, q, k, v, out, len(group) > 1, *(norms or (None, None)))
        return [(op.name, out)]
