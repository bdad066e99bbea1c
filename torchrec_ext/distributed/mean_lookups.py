"""Mean pooling under row-wise sharding with ``drop_bad_indices``.

No rank has a whole bag there: each sums its part, and TorchRec divides by the lengths of the bags
as they came in. So the lookups that every rank would drop have to go before these are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor, PoolingType
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo

from torchrec_ext.bad_indices import offsets_of_good
from torchrec_ext.distributed.plan import MEAN_AFTERWARDS, PlanError
from torchrec_ext.optim_type import OptimType

_LEAST, _GREATEST = -(2**63), 2**63 - 1


def rows_of_features(infos: Iterable[EmbeddingShardingInfo]) -> dict[str, int]:
    """The rows of each feature whose bad lookups must go before the bags are counted.

    Args:
        infos: The tables of a collection, ``fused_params`` settled.

    Raises:
        PlanError: Another table reads the same feature and must see a lookup that this one drops.
    """
    infos = list(infos)
    rows = {
        feature: info.embedding_config.num_embeddings
        for info in infos
        if _is_divided(info)
        for feature in info.embedding_config.feature_names
    }
    for info in infos:
        table = info.embedding_config
        for feature in table.feature_names:
            fits = rows.get(feature) == table.num_embeddings and _drops(info)
            if feature in rows and not fits:
                raise PlanError(
                    f"table {table.name!r}: feature {feature!r} is also read by a table of "
                    f"{rows[feature]} rows with mean pooling, row-wise sharding and "
                    f"drop_bad_indices=True; this one has {table.num_embeddings} rows and "
                    f"drop_bad_indices={_drops(info)}. Shard the other one table_wise or "
                    "column_wise, or give it a feature of its own"
                )
    return rows


def _drops(info: EmbeddingShardingInfo) -> bool:
    fused_params: Mapping[str, Any] = info.fused_params or {}
    ours = isinstance(fused_params.get("optimizer"), OptimType)
    return ours and bool(fused_params.get("drop_bad_indices", False))


def _is_divided(info: EmbeddingShardingInfo) -> bool:
    return (
        _drops(info)
        and getattr(info.embedding_config, "pooling", None) == PoolingType.MEAN
        and info.param_sharding.sharding_type in MEAN_AFTERWARDS
    )


@torch.no_grad()
def without_bad_lookups(features: KeyedJaggedTensor, rows: Mapping[str, int]) -> KeyedJaggedTensor:
    """Takes lookups with bad indices out of some features.

    Args:
        features: This rank's batch.
        rows: The rows of the table of each feature to look at.

    Returns:
        ``features`` itself where there are none.
    """
    keys, values = features.keys(), features.values()
    counts = torch.tensor(features.length_per_key(), device=values.device)
    bounds = torch.tensor([(0, rows[key]) if key in rows else (_LEAST, _GREATEST) for key in keys])
    least, end = (
        torch.repeat_interleave(bound.to(values.device), counts, output_size=values.numel())
        for bound in bounds.unbind(1)
    )
    good = (values >= least) & (values < end)
    if good.all():
        return features
    return KeyedJaggedTensor(
        keys=keys,
        values=values[good],
        weights=_selected(features.weights_or_none(), good),
        offsets=offsets_of_good(good, features.offsets()),
        stride=None if features.variable_stride_per_key() else features.stride(),
        stride_per_key_per_rank=(
            features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
        ),
        inverse_indices=features.inverse_indices_or_none(),
    )


def _selected(weights: Tensor | None, good: Tensor) -> Tensor | None:
    return None if weights is None else weights[good]
