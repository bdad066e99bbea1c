"""Tables that FBGEMM's CPU lookup cannot handle.

Those without rows, which row-wise sharding makes, and those whose features stand in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from torchrec_ext.ops import VariableBatch


def features_without_rows(module: SplitTableBatchedEmbeddingBagsCodegen) -> list[int]:
    """The features whose table has no rows in this module."""
    rows = [spec[0] for spec in module.embedding_specs]
    return [f for f, table in enumerate(module.feature_table_map) if rows[table] == 0]


def set_table_ends(module: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    """Gives FBGEMM's CPU lookup the number of rows behind every feature.

    It takes the first difference other than 0 between an element of ``hash_size_cumsum`` and those
    behind it. FBGEMM's sums over tables make that wrong in two cases, which get sums over features
    instead:

    - A feature reads an earlier table than the feature before it: the difference is below 0 and
      every lookup out of bounds.
    - The last table has no rows: there is no such difference. One element more in the buffer's
      storage, behind its end, stops the search.
    """
    tables = list(module.feature_table_map)
    rows = [module.embedding_specs[table][0] for table in tables]
    if tables == sorted(tables) and 0 not in rows:
        return
    ends = module.hash_size_cumsum.new_tensor([0, *itertools.accumulate(rows)])
    module.hash_size_cumsum = torch.cat([ends, ends[-1:] + 1])[:-1]


def check_no_lookups(
    features: Sequence[int],
    table_names: Sequence[str],
    indices: Tensor,
    offsets: Tensor,
    variable_batch: VariableBatch | None,
) -> None:
    """Checks that a batch looks up nothing in tables without rows.

    Args:
        features: The features to check.
        table_names: Every feature's table.
        indices: ``[lookups]``.
        offsets: ``[features * batch_size + 1]``.
        variable_batch: Where the bags of each feature begin, where batch sizes differ.

    Raises:
        ValueError: A feature has lookups.
    """
    batch_size = (offsets.numel() - 1) // len(table_names)
    bags = [feature * batch_size for feature in range(len(table_names) + 1)]
    if variable_batch is not None:
        bags = variable_batch.feature_bags.tolist()
    for feature in features:
        first, last = offsets[bags[feature]], offsets[bags[feature + 1]]
        if first != last:
            raise ValueError(
                f"table {table_names[feature]!r} has no rows here, but feature {feature} looks up "
                f"{indices[first:last][:5].tolist()} in it; remove these lookups"
            )


def empty_lookup(
    module: SplitTableBatchedEmbeddingBagsCodegen,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> Tensor:
    """The output of a lookup in a module that has no row at all: every bag is empty."""
    shape = output_shape(module, 0, offsets.numel() - 1, batch_sizes)
    return torch.zeros(shape, dtype=SparseType.from_int(module.output_dtype).as_dtype())


def output_shape(
    module: SplitTableBatchedEmbeddingBagsCodegen,
    lookups: int,
    bags: int,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> tuple[int, ...]:
    """The shape of a lookup's output.

    Args:
        module: Looks up.
        lookups: How many the batch has.
        bags: How many the batch has, of all features.
        batch_sizes: ``[features][ranks]`` where they differ.
    """
    if batch_sizes is not None:
        dims = [module.embedding_specs[table][1] for table in module.feature_table_map]
        return (sum(sum(sizes) * dim for sizes, dim in zip(batch_sizes, dims, strict=True)),)
    if module.pooling_mode == PoolingMode.NONE:
        return lookups, module.max_D
    return bags // len(module.feature_table_map), module.total_D
