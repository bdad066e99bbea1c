"""What happens to a rank's batch before TorchRec distributes it.

A mistake that is found here is found by the rank that made it, and not after the distribution, by
the ranks that have the tables. TorchRec would cut floating-point indices to integers there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_ext.distributed.mean_lookups import rows_of_features, without_bad_lookups
from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.lookup_checks import INDEX_DTYPES
from torchrec_ext.optim_type import OptimType

# Where a sharded collection keeps whether it has tables with an optimizer of ours, and the rows of
# the features whose bad lookups are to go.
_OURS = "_torchrec_ext_ours"
_ROWS = "_torchrec_ext_rows"


def _bag_input(original: Function) -> Function:
    """Wraps the input distribution of an ``EmbeddingBagCollection``."""

    @functools.wraps(original)
    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        if _has_ours(self, self._embedding_shardings):
            features = _checked(features, self._embedding_bag_configs)
            if _ROWS not in self.__dict__:
                groups = self.sharding_type_to_sharding_infos.values()
                self.__dict__[_ROWS] = rows_of_features(i for group in groups for i in group)
            if self.__dict__[_ROWS]:
                features = without_bad_lookups(features, self.__dict__[_ROWS])
        return original(self, ctx, features)

    return input_dist


def _sequence_input(original: Function) -> Function:
    """Wraps the input distribution of an ``EmbeddingCollection``."""

    @functools.wraps(original)
    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        if _has_ours(self, self._sharding_type_to_sharding.values()):
            features = _checked(features, self._embedding_configs)
        return original(self, ctx, features)

    return input_dist


def _has_ours(collection: Any, shardings: Iterable[Any]) -> bool:
    """Whether any rank has a table of ours, also where this one has not."""
    if _OURS not in collection.__dict__:
        collection.__dict__[_OURS] = any(
            isinstance((group.fused_params or {}).get("optimizer"), OptimType)
            for sharding in shardings
            for groups in sharding._grouped_embedding_configs_per_rank
            for group in groups
        )
    return collection.__dict__[_OURS]


def _checked(features: Any, tables: Sequence[Any]) -> KeyedJaggedTensor:
    features = maybe_td_to_kjt(features, list(features.keys()))
    keys, dtype = features.keys(), features.values().dtype
    if dtype not in INDEX_DTYPES:
        raise TypeError(
            f"features {keys}: the values have dtype {dtype}, expected torch.int32 or torch.int64; "
            "convert them with .long()"
        )
    for table in tables:
        missing = [name for name in table.feature_names if name not in keys]
        if missing:
            raise ValueError(
                f"table {table.name!r}: the batch has no feature {missing[0]!r}, only {keys}; give "
                "it a bag for each example, empty where there is nothing to look up"
            )
    return features


_PARAMETERS = ("self", "ctx", "features")
SEAMS = (
    Seam(ShardedEmbeddingBagCollection, "input_dist", _PARAMETERS, _bag_input),
    Seam(ShardedEmbeddingCollection, "input_dist", _PARAMETERS, _sequence_input),
)
