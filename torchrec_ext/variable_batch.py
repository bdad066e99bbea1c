"""Batches whose features have different batch sizes (VBE), as the ops take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_ext.ops import VariableBatch


def make_variable_batch(
    batch_sizes: Sequence[Sequence[int]], feature_dims: Sequence[int], device: torch.device
) -> VariableBatch:
    """Finds where the bags of every feature and their gradients begin.

    Bags are numbered feature by feature, rank by rank. FBGEMM's output, and so its gradient, is
    flat and goes rank by rank, feature by feature.

    Args:
        batch_sizes: ``[features][ranks]``, the examples of each feature that each rank asks for.
        feature_dims: ``[features]``.
        device: Where the batch is. What is as long as the batch is made there, and the host does
            not wait for it.
    """
    sizes = torch.tensor(batch_sizes, dtype=torch.int64)
    dims = torch.tensor(feature_dims, dtype=torch.int64)
    blocks = (sizes * dims[:, None]).t().flatten()
    starts = (blocks.cumsum(0) - blocks).view(sizes.shape[1], sizes.shape[0]).t()
    ends = sizes.sum(dim=1).cumsum(0)
    feature_bags = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    counts = sizes.flatten()
    # Bag b of a block that begins with bag a has its gradient at start + (b - a) * dim.
    block_dims = dims[:, None].expand(sizes.shape).flatten()
    bases = starts.flatten() - (counts.cumsum(0) - counts) * block_dims
    total = int(ends[-1])
    of_block = torch.stack([bases, block_dims, counts]).to(device, non_blocking=True)
    of_bag = torch.repeat_interleave(of_block[:2], of_block[2], dim=1, output_size=total)
    bags = torch.arange(total, device=device)
    return VariableBatch(feature_bags.to(device, non_blocking=True), of_bag[0] + bags * of_bag[1])
