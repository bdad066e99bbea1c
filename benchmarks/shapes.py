"""What is measured: shapes of tables and batches, and how indices are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZIPF_EXPONENT = 1.05


@dataclass(frozen=True)
class Shape:
    """Tables and a batch. Every bag has ``pooling`` lookups."""

    tables: int
    rows: int
    dim: int
    batch_size: int
    pooling: int

    def __str__(self) -> str:
        """As in ``4 x 1000000 x 64, 2048 x 20``."""
        return f"{self.tables} x {self.rows} x {self.dim}, {self.batch_size} x {self.pooling}"

    @property
    def lookups(self) -> int:
        """Lookups of a batch."""
        return self.tables * self.batch_size * self.pooling

    def offsets(self) -> Tensor:
        """int64 ``[tables * batch_size + 1]``."""
        return torch.arange(0, self.lookups + 1, self.pooling)


SHAPES = (
    Shape(4, 1_000_000, 64, 2048, 20),
    Shape(8, 500_000, 128, 1024, 20),
    Shape(26, 200_000, 16, 2048, 1),
    Shape(1, 5_000_000, 64, 8192, 20),
)


class Indices:
    """Draws the indices of batches.

    ``uniform``: every row is as likely as any other. ``zipf``: row ``k`` of a fixed random order
    has a probability proportional to ``k ** -1.05``; the order is random because ids are usually
    hashed.
    """

    def __init__(self, shape: Shape, distribution: str, seed: int = 0) -> None:
        """Prepare the random order."""
        self._shape = shape
        self._generator = torch.Generator().manual_seed(seed)
        self._order = None
        if distribution == "zipf":
            self._order = torch.randperm(shape.rows, generator=self._generator)

    def draw(self) -> Tensor:
        """The indices of one batch, int64 ``[lookups]``."""
        size = (self._shape.lookups,)
        if self._order is None:
            return torch.randint(0, self._shape.rows, size, generator=self._generator)
        # The inverse of the distribution function of the continuous power law on [1, rows + 1).
        power = 1.0 - ZIPF_EXPONENT
        uniform = torch.rand(size, generator=self._generator, dtype=torch.float64)
        ranks = (((self._shape.rows + 1.0) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
        return self._order[ranks.long().clamp(1, self._shape.rows) - 1]
