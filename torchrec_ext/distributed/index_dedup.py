"""A CPU kernel of ``fbgemm::jagged_unique_indices``, with which TorchRec deduplicates indices.

FBGEMM has the op's schema and a CUDA kernel. ``EmbeddingCollectionSharder(use_index_dedup=True)``
calls it before it sends a batch's lookups to the ranks that own the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_OP = "jagged_unique_indices"
# Deregisters its kernel when it is collected, so it lives as long as this module.
_library: torch.library.Library | None = None


def register() -> None:
    """Registers the kernel, unless the op has one for the CPU already."""
    global _library
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{_OP}", "CPU"):
        _library = torch.library.Library("fbgemm", "IMPL")
        _library.impl(_OP, unique_indices, "CPU")


def unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the rows that a batch looks up in each table, every one once.

    A table's features stand next to one another and are deduplicated together. Their rows have to
    be told apart by table again from lengths alone, so a table's rows are spread over all bags of
    its features as evenly as they can be, the first bags having one more.

    Args:
        hash_size_cumsum: int64 ``[features + 1]``, the rows of the tables before each feature's.
        hash_size_offsets: int64 ``[features + 1]``, whose distinct values are each table's first
            feature, and the number of features.
        offsets: int64 ``[features * batch_size + 1]``, where each bag's lookups begin.
        indices: int64 ``[lookups]``, feature by feature.

    Returns:
        ``lengths`` ``[features * batch_size]`` and ``offsets`` ``[features * batch_size + 1]`` of
        the bags of rows that are left; these rows ``[unique]``, in ascending order in each table;
        and for every lookup its place among them, int64 ``[lookups]``.

    Raises:
        ValueError: Bags cannot be shared out evenly to features, or an index is not a row of its
            table.
    """
    features = hash_size_cumsum.numel() - 1
    bags = offsets.numel() - 1
    if features < 1 or bags % features:
        raise ValueError(
            f"fbgemm::{_OP}: {bags} bags for {features} features; it takes the same batch size for "
            "every feature"
        )
    batch_size = bags // features
    first_rows = _first_rows(hash_size_cumsum, offsets, indices, batch_size)
    _check_rows(hash_size_cumsum, first_rows, indices)
    rows, reverse = torch.unique(indices + first_rows, return_inverse=True)
    firsts = torch.unique_consecutive(hash_size_offsets)
    ends = torch.searchsorted(rows, hash_size_cumsum[firsts])
    lengths = _spread(ends.diff(), firsts.diff() * batch_size).to(offsets.dtype)
    table = torch.searchsorted(hash_size_cumsum, rows, right=True) - 1
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return lengths, starts, rows - hash_size_cumsum[table], reverse


def _first_rows(
    hash_size_cumsum: Tensor, offsets: Tensor, indices: Tensor, batch_size: int
) -> Tensor:
    """For every lookup, the rows of the tables before its own."""
    lookups = offsets[::batch_size].diff() if batch_size else offsets.new_zeros(0)
    return torch.repeat_interleave(
        hash_size_cumsum[: lookups.numel()], lookups, output_size=indices.numel()
    )


def _check_rows(hash_size_cumsum: Tensor, first_rows: Tensor, indices: Tensor) -> None:
    """An index behind its table's last row would be taken for a row of the next table."""
    ends = hash_size_cumsum[
        torch.searchsorted(hash_size_cumsum, first_rows, right=True).clamp(
            max=hash_size_cumsum.numel() - 1
        )
    ]
    wrong = (indices < 0) | (indices >= ends - first_rows)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"index deduplication: lookup {place} is of row {int(indices[place])} in a table of "
            f"{int(ends[place] - first_rows[place])} rows; remove it or remap it"
        )


def _spread(totals: Tensor, places: Tensor) -> Tensor:
    """Spreads each total evenly over its number of places, the first ones getting one more."""
    of_place = torch.repeat_interleave(places)
    position = torch.arange(of_place.numel()) - (places.cumsum(0) - places)[of_place]
    some = places.clamp(min=1)
    return (totals // some)[of_place] + (position < (totals % some)[of_place])
