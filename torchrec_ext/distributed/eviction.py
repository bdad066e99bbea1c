"""Rows that managed collision evicts: which ones TorchRec means.

TorchRec's managed collision tells a kernel's module by a table's number which rows to reset.
FBGEMM's modules take a feature's number there, and so do ours for other callers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)

from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.tbe import TableBatchedEmbeddingBags


class ModuleByTable:
    """Our module as managed collision sees it: one that takes tables' numbers.

    Args:
        module: The module. All but the reset of rows is its own.
    """

    def __init__(self, module: TableBatchedEmbeddingBags) -> None:
        """See the class."""
        self.module = module

    def __getattr__(self, name: str) -> Any:
        """The module's attribute."""
        if name == "module":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.module, name)

    def reset_embedding_weight_momentum(
        self,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        """Resets rows; ``logical_table_ids`` are tables' numbers in the module."""
        features = self.module.feature_table_map
        first = [features.index(table) for table in logical_table_ids.tolist()]
        self.module.reset_embedding_weight_momentum(
            pruned_indices, pruned_indices_offsets, torch.tensor(first), buffer_ids
        )


def _managed_collision(original: Function) -> Function:
    @functools.wraps(original)
    def create(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        for name, (module, table) in self._table_to_tbe_and_index.items():
            if isinstance(module, TableBatchedEmbeddingBags):
                self._table_to_tbe_and_index[name] = (ModuleByTable(module), table)

    return create


SEAMS = (
    Seam(
        BaseShardedManagedCollisionEmbeddingCollection,
        "__init__",
        (
            "self",
            "module",
            "table_name_to_parameter_sharding",
            "e_sharder",
            "mc_sharder",
            "env",
            "device",
        ),
        _managed_collision,
    ),
)
