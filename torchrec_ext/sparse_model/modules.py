"""Modules that give the outputs of a whole collection from the rows that are not zero.

Rows are found by binary search among the ids of those that were kept, instead of by a lookup table
with an entry for every row: so what a module takes depends on the rows that it has, not on those
that it has not. Every other row becomes one zero row behind them. Lookups of zero rows stay
lookups: they count in the divisor of a mean, and sums are taken in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_ext.sparse_model.files import read
from torchrec_ext.sparse_model.tables import SparseCollection, SparseTable

_DATA_TYPES = {torch.float32: DataType.FP32, torch.float16: DataType.FP16}
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


class KeptRows(nn.Module):
    """Finds rows of a whole table among those that were kept.

    Args:
        table: The table.
    """

    row_ids: Tensor

    def __init__(self, table: SparseTable) -> None:
        super().__init__()
        self.table = table.name
        self.rows = table.rows
        self.dim = table.dim
        # The end is no row: a search never runs past it.
        end = torch.tensor([table.rows], dtype=table.row_ids.dtype)
        self.register_buffer("row_ids", torch.cat([table.row_ids, end]))

    def forward(self, indices: Tensor, feature: str) -> Tensor:
        """Give the position of each row, or that of the zero row behind them.

        Args:
            indices: ``[lookups]`` int32 or int64 rows of the whole table.
            feature: Where they come from, for errors.

        Returns:
            ``[lookups]``, of the dtype of ``indices``.

        Raises:
            IndexError: An index is not a row of the whole table.
        """
        if indices.numel() == 0:
            return indices
        least, greatest = (int(end) for end in torch.aminmax(indices))
        if least < 0 or greatest >= self.rows:
            raise IndexError(
                f"feature {feature!r}: index {least if least < 0 else greatest} is no row of table "
                f"{self.table!r}, which has rows 0 to {self.rows - 1}"
            )
        wanted = indices.to(self.row_ids.dtype)
        positions = torch.searchsorted(self.row_ids, wanted)
        found = self.row_ids[positions] == wanted
        return torch.where(found, positions, len(self.row_ids) - 1).to(indices.dtype)


class SparseModule(nn.Module):
    """What pooled and unpooled collections share.

    Args:
        content: The rows that are not zero.

    Raises:
        ValueError: Two outputs would have one name.
    """

    collection: nn.Module

    def __init__(self, content: SparseCollection) -> None:
        super().__init__()
        self.is_weighted = content.is_weighted
        self.feature_names = [list(table.feature_names) for table in content.tables]
        self.kept_rows = nn.ModuleList([KeptRows(table) for table in content.tables])
        # A feature of several tables has another position in each: one key for each of them.
        self.embedding_names = get_embedding_names_by_table(
            [_config(EmbeddingConfig, table, list(table.feature_names)) for table in content.tables]
        )
        names = Counter(name for names in self.embedding_names for name in names)
        if len(names) < names.total():
            raise ValueError(f"two outputs have the name {names.most_common(1)[0][0]!r}")

    def _positions(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Turn rows of the whole tables into those of the pruned ones."""
        if features.variable_stride_per_key():
            raise NotImplementedError("sparse models need as many bags of every feature")
        given = features.to_dict()
        keys, values, lengths, weights = [], [], [], []
        for kept, names, own in zip(
            self.kept_rows, self.feature_names, self.embedding_names, strict=True
        ):
            for feature, key in zip(names, own, strict=True):
                if feature not in given:
                    raise KeyError(
                        f"feature {feature!r} of table {kept.table!r} is not in the batch, which "
                        f"has {list(given)}"
                    )
                jagged = given[feature]
                keys.append(key)
                values.append(kept(jagged.values(), feature))
                lengths.append(jagged.lengths())
                if self.is_weighted:
                    weights.append(jagged.weights())
        return KeyedJaggedTensor(
            keys,
            torch.cat(values),
            weights=torch.cat(weights) if weights else None,
            lengths=torch.cat(lengths),
        )


class SparseEmbeddingBagCollection(SparseModule):
    """Gives what an ``EmbeddingBagCollection`` gives whose other rows are zero.

    It is for inference: training would move the zero row, which stands for many.

    Args:
        content: The rows that are not zero.
    """

    def __init__(self, content: SparseCollection) -> None:
        super().__init__(content)
        configs = [
            _config(EmbeddingBagConfig, table, names, pooling=_POOLING[str(table.pooling)])
            for table, names in zip(content.tables, self.embedding_names, strict=True)
        ]
        collection = EmbeddingBagCollection(
            configs, is_weighted=content.is_weighted, device=torch.device("cpu")
        )
        _fill(collection.embedding_bags, content.tables)
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool rows.

        Args:
            features: Rows of the whole tables; further keys are ignored.

        Returns:
            float32 ``[batch, sum of the features' dims]``, with the whole collection's keys.

        Raises:
            IndexError: An index is no row of its table.
            KeyError: A feature is missing.
            NotImplementedError: Features have other numbers of bags than each other.
        """
        return self.collection(self._positions(features))


class SparseEmbeddingCollection(SparseModule):
    """Gives what an ``EmbeddingCollection`` gives whose other rows are zero.

    It is for inference: training would move the zero row, which stands for many.

    Args:
        content: The rows that are not zero.
    """

    def __init__(self, content: SparseCollection) -> None:
        super().__init__(content)
        self.need_indices = content.need_indices
        configs = [
            _config(EmbeddingConfig, table, names)
            for table, names in zip(content.tables, self.embedding_names, strict=True)
        ]
        collection = EmbeddingCollection(configs, device=torch.device("cpu"))
        _fill(collection.embeddings, content.tables)
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up rows.

        Args:
            features: Rows of the whole tables; further keys are ignored.

        Returns:
            By the whole collection's keys, float32 ``[lookups, dim]`` with the features' lengths.

        Raises:
            IndexError: An index is no row of its table.
            KeyError: A feature is missing.
            NotImplementedError: Features have other numbers of bags than each other.
        """
        found: dict[str, JaggedTensor] = self.collection(self._positions(features))
        if not self.need_indices:
            return found
        given = features.to_dict()
        return {
            key: JaggedTensor(
                found[key].values(), lengths=found[key].lengths(), weights=given[feature].values()
            )
            for names, keys in zip(self.feature_names, self.embedding_names, strict=True)
            for feature, key in zip(names, keys, strict=True)
        }


def load(path: str | Path) -> SparseEmbeddingBagCollection | SparseEmbeddingCollection:
    """Build the module of a file that ``save`` or ``torchrec-ext export`` wrote.

    Args:
        path: The file.

    Raises:
        SparseModelError: See ``files.read``.
    """
    content = read(path)
    if content.pooled:
        return SparseEmbeddingBagCollection(content)
    return SparseEmbeddingCollection(content)


def _config(kind: type, table: SparseTable, feature_names: list[str], **keywords: Any) -> Any:
    return kind(
        name=table.name,
        num_embeddings=len(table.row_ids) + 1,
        embedding_dim=table.dim,
        feature_names=feature_names,
        data_type=_DATA_TYPES[table.weight.dtype],
        init_fn=nn.init.zeros_,
        **keywords,
    )


@torch.no_grad()
def _fill(modules: nn.ModuleDict, tables: Sequence[SparseTable]) -> None:
    """Copy the rows; the last one stays zero."""
    for table in tables:
        (weight,) = modules[table.name].parameters()
        weight[:-1] = table.weight
        weight.requires_grad_(False)
