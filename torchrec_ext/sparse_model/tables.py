"""Tables without their zero rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_ext.optim_type import OptimType
from torchrec_ext.sparsity import nonzero_rows, row_id_dtype

POOLINGS = ("sum", "mean")
DTYPES = (torch.float32, torch.float16)


@dataclass(frozen=True)
class SparseTable:
    """The rows of a table that are not zero.

    Attributes:
        name: The table's name.
        rows: Rows of the whole table.
        feature_names: The features that look it up.
        pooling: ``sum`` or ``mean``; None in a collection that does not pool.
        optimizer: What trained it, for people; None if unknown.
        row_ids: ``[kept]`` int32 or int64, ascending: which rows the others are.
        weight: ``[kept, dim]`` float32 or float16.
    """

    name: str
    rows: int
    feature_names: tuple[str, ...]
    pooling: str | None
    optimizer: str | None
    row_ids: Tensor
    weight: Tensor

    @property
    def dim(self) -> int:
        """Columns."""
        return self.weight.shape[1]


@dataclass(frozen=True)
class SparseCollection:
    """The tables of one collection in its order.

    Attributes:
        tables: All with ``pooling``, or all without.
        is_weighted: Whether bags have per-sample weights.
        need_indices: Whether a collection that does not pool gives indices too.
    """

    tables: tuple[SparseTable, ...]
    is_weighted: bool = False
    need_indices: bool = False

    @property
    def pooled(self) -> bool:
        """Whether it is an ``EmbeddingBagCollection``."""
        return self.tables[0].pooling is not None


@torch.no_grad()
def prune_table(
    weight: Tensor,
    name: str,
    feature_names: tuple[str, ...],
    pooling: str | None,
    optimizer: str | None = None,
) -> SparseTable:
    """Copy the rows of a table that are not zero.

    Args:
        weight: ``[rows, dim]`` float32 or float16.
        name: The table's name.
        feature_names: The features that look it up.
        pooling: ``sum``, ``mean`` or None.
        optimizer: What trained it.

    Raises:
        TypeError: ``weight`` is of another dtype.
    """
    if weight.dtype not in DTYPES:
        raise TypeError(f"table {name!r} is {weight.dtype}; sparse models are float32 or float16")
    kept = nonzero_rows(weight).nonzero().flatten()
    ids = kept.to(row_id_dtype(len(weight))).cpu()
    rows = weight[kept].cpu()
    return SparseTable(name, len(weight), feature_names, pooling, optimizer, ids, rows)


def prune_collection(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    optimizers: Mapping[str, str | OptimType] | None = None,
) -> SparseCollection:
    """Copy the rows of a collection that are not zero.

    Args:
        collection: An unsharded one. To get one from a sharded model, load the model's checkpoint
            into it: the names of the tables are the same.
        optimizers: What trained each table, by name.

    Raises:
        TypeError: ``collection`` is something else.
        ValueError: It has no table, it is on the meta device, or ``optimizers`` names none of its
            tables.
    """
    parameters, configs = _tables_of(collection)
    optimizers = optimizers or {}
    if not configs:
        raise ValueError("the collection has no table")
    unknown = [name for name in optimizers if name not in parameters]
    if unknown:
        raise ValueError(f"optimizers: no table {unknown[0]!r}; there are {list(parameters)}")
    for name, weight in parameters.items():
        if weight.device.type == "meta":
            raise ValueError(f"table {name!r} is on the meta device and has no weights")
    tables = tuple(
        prune_table(
            parameters[config.name],
            config.name,
            tuple(config.feature_names),
            pooling_type_to_str(config.pooling) if hasattr(config, "pooling") else None,
            _name_of(optimizers.get(config.name)),
        )
        for config in configs
    )
    if isinstance(collection, EmbeddingBagCollection):
        return SparseCollection(tables, is_weighted=collection.is_weighted())
    return SparseCollection(tables, need_indices=collection.need_indices())


def _tables_of(
    collection: EmbeddingBagCollection | EmbeddingCollection,
) -> tuple[dict[str, Tensor], list[BaseEmbeddingConfig]]:
    if isinstance(collection, EmbeddingBagCollection):
        modules, configs = collection.embedding_bags, collection.embedding_bag_configs()
    elif isinstance(collection, EmbeddingCollection):
        modules, configs = collection.embeddings, collection.embedding_configs()
    else:
        raise TypeError(
            f"cannot prune a {type(collection).__name__}; expected an unsharded "
            "EmbeddingBagCollection or EmbeddingCollection (load a sharded model's checkpoint into "
            "one)"
        )
    return {name: module.weight for name, module in modules.items()}, list(configs)


def _name_of(optimizer: str | OptimType | None) -> str | None:
    return optimizer.name.lower() if isinstance(optimizer, OptimType) else optimizer
