"""Batches whose features have different batch sizes (VBE), as the ops take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor

from torchrec_ext.op_arguments import VariableBatch
from torchrec_ext.optimizer_clock import OptimizerClock


def check_batch_sizes(
    module: OptimizerClock,
    batch_sizes: Sequence[Sequence[int]],
    offsets: Tensor,
    forward_arguments: Mapping[str, Any],
) -> None:
    """Checks what a forward with variable batch sizes got.

    Raises:
        ValueError: The module does not pool, or the sizes do not fit its features or the offsets.
        NotImplementedError: FBGEMM's output buffers for such batches were given.
    """
    tables, features = module.table_labels, len(module.feature_table_map)
    argument = f"tables {tables}: batch_size_per_feature_per_rank"
    if module.pooling_mode == PoolingMode.NONE:
        raise ValueError(f"{argument} needs sum or mean pooling")
    if not _is_table_of_integers(batch_sizes):
        raise ValueError(f"{argument}={batch_sizes!r} must be a list of integers for each feature")
    if len(batch_sizes) != features:
        raise ValueError(
            f"{argument} has batch sizes for {len(batch_sizes)} features, expected {features}"
        )
    ranks = {len(sizes) for sizes in batch_sizes}
    if len(ranks) != 1 or 0 in ranks:
        raise ValueError(
            f"{argument}={batch_sizes} has batch sizes for {sorted(ranks)} ranks; every feature "
            "needs one for each rank"
        )
    if min(map(min, batch_sizes)) < 0:
        raise ValueError(f"{argument}={batch_sizes} has a batch size below 0")
    total = sum(map(sum, batch_sizes))
    if total != offsets.numel() - 1:
        raise ValueError(
            f"{argument} adds up to {total} bags, but the offsets are those of "
            f"{offsets.numel() - 1}"
        )
    for name in ("vbe_output", "vbe_output_offsets"):
        if forward_arguments.get(name) is not None:
            raise NotImplementedError(f"tables {tables}: {name} is not supported; leave it out")


def _is_table_of_integers(batch_sizes: Any) -> bool:
    return isinstance(batch_sizes, list | tuple) and all(
        isinstance(sizes, list | tuple)
        and all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
        for sizes in batch_sizes
    )


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
