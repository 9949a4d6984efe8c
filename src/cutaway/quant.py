"""The weight formats: the layout of a group, how it is dequantised, how values are quantised (NumPy).

This is the definition of every format; the C++ kernels are tested against it. Read next: `forward/reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["FORMATS", "Format", "Weight", "dequantize"]


@dataclass(frozen=True)
class Format:
    """A weight format: `group` values take `group_bytes` bytes in the file."""

    name: str
    group: int
    group_bytes: int

    @property
    def bits(self) -> float:
        """Bits a weight, scales included."""
        return 8 * self.group_bytes / self.group


FORMATS = {
    f.name: f
    for f in (
        Format("F32", 1, 4),
        Format("F16", 1, 2),
        Format("BF16", 1, 2),
        Format("Q4_0", 32, 18),
        Format("Q4_1", 32, 20),
        Format("Q5_0", 32, 22),
        Format("Q5_1", 32, 24),
        Format("Q8_0", 32, 34),
        Format("Q2_K", 256, 84),
        Format("Q3_K", 256, 110),
        Format("Q4_K", 256, 144),
        Format("Q5_K", 256, 176),
        Format("Q6_K", 256, 210),
    )
}


@dataclass
class Weight:
    """One named weight as its file holds it.

    `data`: uint8 [rows, row_bytes], usually a view of a memory map; `shape`: () + (values,) or (rows, columns).
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def dequantize(self) -> np.ndarray:
        """All values as float32 of `shape`."""
        return dequantize(self.format, self.data).reshape(self.shape)


def dequantize(format: str, data: np.ndarray) -> np.ndarray:
    """uint8 [rows, row_bytes] -> float32 [rows, columns]."""
    raise NotImplementedError
