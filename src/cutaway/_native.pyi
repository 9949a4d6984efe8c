"""Types of the compiled extension (`native/bindings.cpp`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

def isas() -> list[str]: ...
def usable_cores() -> int: ...
def read_bandwidth(threads: int, bytes: int = ..., repeats: int = ...) -> float: ...
def packed_bytes(format: str, rows: int, columns: int) -> int: ...
def pack(
    format: str, data: np.ndarray, columns: int, pool: Pool, mapped: bool = ..., arena: Arena | None = ...
) -> Packed: ...
def pack_all(
    formats: Sequence[str],
    data: Sequence[np.ndarray],
    columns: Sequence[int],
    mapped: Sequence[bool],
    head: int,
    isa: str,
    pool: Pool,
    arena: Arena,
) -> list[Packed]: ...
def unpack(packed: Packed, isa: str = ...) -> np.ndarray: ...
def matmul(
    w: Packed,
    x: np.ndarray,
    isa: str,
    int8: bool,
    pool: Pool,
    bias: np.ndarray | None = ...,
    residual: np.ndarray | None = ...,
    up: Packed | None = ...,
    up_bias: np.ndarray | None = ...,
) -> np.ndarray: ...
def quantize(x: np.ndarray, isa: str = ...) -> tuple[np.ndarray, np.ndarray]: ...
def row_kernel(name: str, a: np.ndarray, b: np.ndarray, eps: float = ..., isa: str = ...) -> np.ndarray: ...

class Pool:
    threads: int
    def __init__(self, threads: int) -> None: ...

class Arena:
    nbytes: int
    def __init__(self, bytes: int) -> None: ...

class Packed:
    nbytes: int
    shape: tuple[int, int]

class Plan:
    head_rows_finished: int
    scratch_bytes: int
    bound: Any
    def __init__(
        self,
        isa: str,
        pool: Pool,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_layers: int,
        eps: float,
        int8: bool,
    ) -> None: ...
    def buffer(self, width: int, outputs: bool) -> int: ...
    def embedding(self, format: str, data: np.ndarray, columns: int) -> None: ...
    def rope_tables(self, cos: np.ndarray, sin: np.ndarray) -> None: ...
    def bind_kv(
        self,
        k: list[np.ndarray],
        v: list[np.ndarray],
        k_scale: list[np.ndarray],
        v_scale: list[np.ndarray],
        k_type: str,
        v_type: str,
    ) -> None: ...
    def embed(self, out: int) -> int: ...
    def rows(self, kind: str, in_: int, in2: int, out: int, weight: np.ndarray | None, outputs: bool, /) -> int: ...
    def attention(
        self,
        layer: int,
        q: int,
        k: int,
        v: int,
        out: int,
        rope: bool,
        q_norm: np.ndarray | None,
        k_norm: np.ndarray | None,
    ) -> int: ...
    def matmul(
        self,
        in_: int,
        w: list[Packed],
        bias: list[np.ndarray | None],
        out: list[int],
        residual: int,
        norm: np.ndarray | None,
        silu_out: int,
        outputs: bool,
        /,
    ) -> int: ...
    def top_head(self, in_: int, vocab: int, /) -> int: ...
    def begin(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        query_starts: np.ndarray,
        context_lengths: np.ndarray,
        block_tables: np.ndarray,
        output_rows: np.ndarray,
        top_k: int,
    ) -> None: ...
    def run(self, first: int, last: int, profile: bool, store_only: bool = ...) -> None: ...
    def view(self, buffer: int) -> np.ndarray: ...
    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]: ...
    def times(self) -> list[float]: ...
