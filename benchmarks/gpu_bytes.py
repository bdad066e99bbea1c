"""The bytes that a step on a device has to move; docs/cuda.md derives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from torchrec_ext.optimizers import State

#: Lookups of a stored sum of each level (csrc/gradient_order.h).
SUM_SIZES = (32, 1024, 32768)
_FLOAT = 4
_SORT_DIGIT = 8


def step_bytes(shape: Shape, indices: Tensor, states: Sequence[State]) -> int:
    """For float32 weights and gradients and an unweighted sum, sorting included.

    Args:
        shape: Tables and batch.
        indices: One batch, on the CPU.
        states: The optimizer's.
    """
    per_table = indices.view(shape.tables, -1)
    counts = torch.cat([torch.unique(part, return_counts=True)[1] for part in per_table])
    width = shape.dim * _FLOAT
    state_bytes = sum(_FLOAT if state.rowwise else width for state in states)
    rows = counts.numel() * 2 * (width + state_bytes)
    gradients = shape.lookups * width
    return rows + gradients + stored_sum_bytes(counts, width) + sort_bytes(shape)


def stored_sum_bytes(counts: Tensor, width: int) -> int:
    """Sums over many lookups of a row: written once and read once.

    Args:
        counts: The lookups of each row.
        width: Bytes of a row.
    """
    stored = sum(int((counts[counts > size] // size).sum()) for size in SUM_SIZES)
    return 2 * stored * width


def sort_bytes(shape: Shape) -> int:
    """Keys, positions and sources made, sorted digit by digit, and read again."""
    total_rows = shape.tables * shape.rows
    passes = -(-max((total_rows - 1).bit_length(), 1) // _SORT_DIGIT)
    # Index in; key, position, source out. Each pass reads keys to count and pairs to move them.
    per_lookup = 8 + 3 * 4 + passes * (4 + 2 * 8)
    # Then the keys are read for where rows begin, positions and sources for the sums.
    return shape.lookups * (per_lookup + 3 * 4)
