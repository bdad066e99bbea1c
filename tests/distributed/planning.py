"""Tables, options and plans for tests; nothing here is sharded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Perf, ShardingOption, Storage
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig

ROWS, DIM, COLUMNS_PER_SHARD = 1000, 64, 16
RANKS, RANKS_PER_HOST = 4, 2
BATCH_SIZE = 32
SHARDING_TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
)


def collection(
    names: Sequence[str] = ("t0",),
    *,
    pooled: bool = True,
    dtype: DataType = DataType.FP16,
    rows: int | dict[str, int] = ROWS,
    dim: int = DIM,
) -> Any:
    """Tables of ``rows`` (of each, or by name) x ``dim`` on the meta device."""
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    configs: list[Any] = [
        config(
            name=name,
            num_embeddings=rows if isinstance(rows, int) else rows[name],
            embedding_dim=dim,
            feature_names=[f"f_{name}"],
            data_type=dtype,
        )
        for name in names
    ]
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    return kind(tables=configs, device=torch.device("meta"))


def apply(module: Any, cls: Any, table: str = "t0", **keywords: Any) -> None:
    """Applies an optimizer class to a table of a collection."""
    (parameter,) = (p for name, p in module.named_parameters() if f".{table}." in name)
    _apply_optimizer_in_backward(cls, [parameter], {"lr": 0.1, **keywords})


def topology(device: str = "cpu", **keywords: Any) -> Topology:
    """Four ranks on two hosts."""
    return Topology(
        world_size=RANKS, local_world_size=RANKS_PER_HOST, compute_device=device, **keywords
    )


def constraints(
    sharding_types: Sequence[str] = SHARDING_TYPES,
    kernels: Sequence[str] | None = None,
    names: Sequence[str] = ("t0",),
    columns: int | None = COLUMNS_PER_SHARD,
) -> dict[str, ParameterConstraints]:
    """The same constraints for every table; column shards have at least ``columns`` columns."""
    return {
        name: ParameterConstraints(
            sharding_types=list(sharding_types),
            compute_kernels=None if kernels is None else list(kernels),
            min_partition=columns,
        )
        for name in names
    }


def options_of(
    module: Any, sharder: Any, device: str = "cpu", estimator: Any = None, **constrained: Any
) -> list[ShardingOption]:
    """Every option of a module's tables, estimated by TorchRec's classes or by ``estimator``."""
    limits = constraints(**constrained) if constrained else None
    enumerator = EmbeddingEnumerator(topology(device), BATCH_SIZE, limits, estimator)
    return enumerator.enumerate(torch.nn.Sequential(module), [sharder])


def estimates_of(
    options: Sequence[ShardingOption],
) -> dict[tuple[str, str, str], list[tuple[Storage, Perf]]]:
    """Storage and perf of each shard by table, sharding type and kernel."""
    return {
        (option.name, option.sharding_type, option.compute_kernel): [
            (shard.storage, shard.perf) for shard in option.shards
        ]
        for option in options
    }


def states_storage(module: Any, sharder: Any, plain: tuple[Any, Any], **keywords: Any) -> Any:
    """What the states of each option's shards take: the difference to a module without states."""
    found = estimates_of(options_of(module, sharder, **keywords))
    without = estimates_of(options_of(*plain, **keywords))
    assert found.keys() == without.keys() and found
    return {
        key: [
            (mine.hbm - other.hbm, mine.ddr - other.ddr)
            for (mine, _), (other, _) in zip(found[key], without[key], strict=True)
        ]
        for key in found
    }


def moved_on(sharding: ParameterSharding, ranks: int) -> ParameterSharding:
    """The same shards, each on the next rank."""
    changed = copy.deepcopy(sharding)
    assert isinstance(changed.sharding_spec, EnumerableShardingSpec)
    changed.ranks = [(rank + 1) % ranks for rank in changed.ranks]
    for shard, rank in zip(changed.sharding_spec.shards, changed.ranks, strict=True):
        shard.placement = torch.distributed._remote_device(f"rank:{rank}/cpu")
    return changed
