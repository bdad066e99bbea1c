"""Lookups whose index is outside of their table: what to say about them, and how to drop them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_ext.optimizer_states import OptimizerStates


class GoodLookups(NamedTuple):
    """What a batch looks up without the lookups that are dropped.

    Attributes:
        indices: ``[good lookups]``, of the batch's dtype.
        offsets: Of the shape and dtype of the batch's.
        per_sample_weights: ``[good lookups]`` or None; a dropped weight gets a gradient of 0.
        positions: int64 ``[good lookups]``, where they were; None: nothing was dropped.
    """

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    positions: Tensor | None

    def with_zero_rows(self, output: Tensor, lookups: int) -> Tensor:
        """The output of a lookup without pooling, with a row of zeros for each dropped lookup.

        Args:
            output: ``[good lookups, D]``.
            lookups: How many the batch had.
        """
        if self.positions is None:
            return output
        return output.new_zeros(lookups, output.shape[1]).index_copy(0, self.positions, output)


def is_bad(
    indices: Tensor, offsets: Tensor, rows: Tensor, batch_sizes: Sequence[Sequence[int]] | None
) -> Tensor:
    """Which lookups have an index outside of ``[0, rows)``.

    Args:
        indices: int32 or int64 ``[lookups]``.
        offsets: ``[bags + 1]``, ascending from 0 to the number of lookups.
        rows: int64 ``[features]``, the rows of each feature's table.
        batch_sizes: ``[features][ranks]`` where they differ.

    Returns:
        bool ``[lookups]``.
    """
    ends = offsets[_feature_bags(offsets, rows.numel(), batch_sizes)].to(torch.int64)
    limits = torch.repeat_interleave(rows, ends.diff(), output_size=indices.numel())
    return (indices < 0) | (indices >= limits)


def keep_good(
    module: OptimizerStates,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> GoodLookups:
    """Takes the lookups with bad indices out of a batch.

    Raises:
        ValueError: The offsets do not ascend from 0 to the number of lookups, so that nobody can
            say which table a lookup is for.
    """
    problem = offsets_problem(offsets, indices.numel())
    if problem is not None:
        raise ValueError(f"tables {module.table_labels}: {problem}")
    bad = is_bad(indices, offsets, module.rows_per_table, batch_sizes)
    if not bad.any():
        return GoodLookups(indices, offsets, per_sample_weights, None)
    positions = (~bad).nonzero().flatten()
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights.index_select(0, positions)
    return GoodLookups(
        indices[positions], offsets_of_good(~bad, offsets), per_sample_weights, positions
    )


def offsets_of_good(good: Tensor, offsets: Tensor) -> Tensor:
    """Where bags start when only the good lookups are left.

    Args:
        good: bool ``[lookups]``.
        offsets: ``[bags + 1]``.
    """
    before = torch.cat([good.new_zeros(1, dtype=torch.int64), good.cumsum(0)])
    return before[offsets.long()].to(offsets.dtype)


def offsets_problem(offsets: Tensor, lookups: int) -> str | None:
    """Says what is wrong with offsets; None if nothing is."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != lookups:
        return (
            f"offsets must start at 0 and end at the number of indices, {lookups}, but are "
            f"{int(offsets[0])} and {int(offsets[-1])}"
        )
    descends = (offsets.diff() < 0).nonzero()
    if descends.numel():
        bag = int(descends[0])
        return (
            f"offsets must not descend, but offsets[{bag}:{bag + 2}]="
            f"{offsets[bag : bag + 2].tolist()}: bag {bag} has a negative length"
        )
    return None


@contextlib.contextmanager
def explained(
    module: OptimizerStates,
    indices: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> Iterator[None]:
    """Around FBGEMM's lookup on the CPU, whose errors name neither a table nor a fix.

    Raises:
        RuntimeError: FBGEMM's, or instead of it one that names the table and the first bad index.
    """
    try:
        yield
    except RuntimeError as error:
        if indices.is_meta:  # no values to look for
            raise
        problem = offsets_problem(offsets, indices.numel())
        if problem is None:
            problem = _indices_problem(module, indices, offsets, batch_sizes)
        else:
            problem = f"tables {module.table_labels}: {problem}"
        if problem is None:
            raise
        raise RuntimeError(problem) from error


def _indices_problem(
    module: OptimizerStates,
    indices: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> str | None:
    bad = is_bad(indices, offsets, module.rows_per_table, batch_sizes)
    if not bad.any():
        return None
    position = int(bad.nonzero()[0])
    ends = offsets[_feature_bags(offsets, len(module.feature_table_map), batch_sizes)]
    feature = int((ends[1:] <= position).sum())
    table = module.feature_table_map[feature]
    return (
        f"table {module.table_labels[table]!r} has {module.embedding_specs[table][0]} rows here, "
        f"but indices[{position}]={int(indices[position])} (feature {feature}; {int(bad.sum())} "
        "bad in this batch) is outside of them; correct the input, or drop such lookups with "
        "drop_bad_indices=True"
    )


def _feature_bags(
    offsets: Tensor, features: int, batch_sizes: Sequence[Sequence[int]] | None
) -> Tensor:
    """int64 ``[features + 1]``: where each feature's bags begin, and their end."""
    if batch_sizes is None:
        return torch.arange(features + 1) * ((offsets.numel() - 1) // features)
    return torch.tensor([0, *itertools.accumulate(sum(sizes) for sizes in batch_sizes)])
