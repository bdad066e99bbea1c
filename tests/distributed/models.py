"""Small sharded models for the tests, and what they would compute unsharded in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from .updates import Update

BATCH_SIZE = 8
COLUMNS_PER_SHARD = 4


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a test model."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: PoolingType = PoolingType.SUM


# Two features on one table, mean pooling, and a table with fewer rows than two ranks have.
BAG_TABLES = (
    Table("t0", 23, 8, ("f0", "f3")),
    Table("t1", 11, 16, ("f1",), PoolingType.MEAN),
    Table("t2", 1, 8, ("f2",)),
)
# What TorchRec can train weighted, and under grid_shard.
SUM_TABLES = tuple(dataclasses.replace(table, pooling=PoolingType.SUM) for table in BAG_TABLES)
SEQUENCE_TABLES = (
    Table("t0", 23, 8, ("f0", "f3")),
    Table("t1", 11, 8, ("f1",)),
    Table("t2", 1, 8, ("f2",)),
)


class Model(torch.nn.Module):
    """An embedding collection and a loss of its output."""

    def __init__(
        self, tables: Sequence[Table] = BAG_TABLES, pooled: bool = True, weighted: bool = False
    ) -> None:
        super().__init__()
        if pooled:
            configs: list[Any] = [
                EmbeddingBagConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=list(table.features),
                    pooling=table.pooling,
                )
                for table in tables
            ]
            self.ebc = EmbeddingBagCollection(configs, is_weighted=weighted)
        else:
            configs = [
                EmbeddingConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=list(table.features),
                )
                for table in tables
            ]
            self.ec = EmbeddingCollection(tables=configs)
        self.pooled = pooled

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Half the squared distance of every embedding to a fixed target, a mean over examples."""
        if self.pooled:
            embeddings = list(self.ebc(features).to_dict().values())
        else:
            embeddings = [jagged.values() for jagged in self.ec(features).values()]
        return sum(loss_of(embedding) for embedding in embeddings) / features.stride()


def loss_of(embedding: torch.Tensor) -> torch.Tensor:
    """The loss of one feature's embeddings, summed over examples or lookups."""
    target = torch.linspace(-1.0, 1.0, embedding.shape[-1], dtype=embedding.dtype)
    return 0.5 * (embedding - target).square().sum()


@dataclasses.dataclass(frozen=True)
class Lookups:
    """One global batch: for every feature the rows and weights of every example's bag."""

    rows: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]

    def of_rank(self, rank: int, ranks: int, weighted: bool = False) -> KeyedJaggedTensor:
        """The slice of the batch that one rank feeds."""
        share = BATCH_SIZE // ranks
        examples = slice(rank * share, (rank + 1) * share)
        bags = [bag for feature in self.rows.values() for bag in feature[examples]]
        weights = [bag for feature in self.weights.values() for bag in feature[examples]]
        return KeyedJaggedTensor(
            keys=list(self.rows),
            values=torch.tensor([row for bag in bags for row in bag], dtype=torch.int64),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            weights=torch.tensor([w for bag in weights for w in bag]) if weighted else None,
        )


def batches(steps: int, tables: Sequence[Table] = BAG_TABLES) -> list[Lookups]:
    """Deterministic batches with empty bags and rows that repeat inside a bag and across bags."""
    generator = torch.Generator().manual_seed(7)

    def integers(high: int, count: int) -> list[int]:
        return torch.randint(high, (count,), generator=generator).tolist()

    limits: dict[str, int] = {}  # a feature may be read by several tables
    for table in tables:
        for feature in table.features:
            limits[feature] = min(limits.get(feature, table.rows), table.rows)
    result = []
    for _ in range(steps):
        rows = {
            feature: [integers(limits[feature], length) for length in integers(4, BATCH_SIZE)]
            for table in tables
            for feature in table.features
        }
        weights = {
            feature: [[0.5 + 0.25 * value for value in integers(7, len(bag))] for bag in bags]
            for feature, bags in rows.items()
        }
        result.append(Lookups(rows, weights))
    return result


def initial_weights(tables: Sequence[Table] = BAG_TABLES) -> dict[str, torch.Tensor]:
    """Starting weights of every table, ``[rows, dim]`` float32."""
    generator = torch.Generator().manual_seed(3)
    return {t.name: torch.randn(t.rows, t.dim, generator=generator) * 0.1 for t in tables}


def plan_for(
    model: torch.nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    sharding_type: str | None,
    tables: Sequence[Table] = BAG_TABLES,
    local_world_size: int | None = None,
    columns: int = COLUMNS_PER_SHARD,
) -> ShardingPlan:
    """The planner's plan, with one sharding type or (None) as it likes.

    Column shards have at least ``columns`` columns.
    """
    world_size = dist.get_world_size()
    topology = Topology(
        world_size=world_size,
        compute_device="cpu",
        local_world_size=local_world_size or world_size,
    )
    constraints = None
    if sharding_type is not None:
        constraint = ParameterConstraints(sharding_types=[sharding_type], min_partition=columns)
        constraints = {table.name: constraint for table in tables}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.collective_plan(model, list(sharders), dist.group.WORLD)


def shard(
    model: torch.nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    plan: ShardingPlan,
) -> DistributedModelParallel:
    """The model under DistributedModelParallel on the current ranks."""
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=list(sharders),
    )


def kernels_of(model: DistributedModelParallel) -> list[torch.nn.Module]:
    """The embedding kernels that this rank holds."""
    collection = model.module.ebc if model.module.pooled else model.module.ec
    return [kernel for lookup in collection._lookups for kernel in lookup._emb_modules]


def modules_by_table(model: DistributedModelParallel) -> dict[str, Any]:
    """This rank's table-batched modules by the name of the tables in them."""
    return {
        table.name: kernel.emb_module
        for kernel in kernels_of(model)
        for table in kernel.config.embedding_tables
    }


def write_weights(model: DistributedModelParallel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies full tables into this rank's shards."""
    for name, sharded in model.state_dict().items():
        full = weights[name.split(".")[-2]]
        for part in sharded.local_shards():
            part.tensor.copy_(full[_region(part)])


def read_weights(model: DistributedModelParallel) -> dict[str, list[Any]]:
    """This rank's shards by table: (offsets, tensor) pairs for ``assemble``."""
    return {name.split(".")[-2]: _parts(sharded) for name, sharded in model.state_dict().items()}


def read_states(model: DistributedModelParallel) -> dict[str, list[Any]]:
    """This rank's shards of every optimizer state by TorchRec's key: pairs for ``assemble``."""
    return {
        key: _parts(sharded)
        for states in model.fused_optimizer.state_dict()["state"].values()
        for key, sharded in states.items()
        if isinstance(sharded, ShardedTensor)
    }


def read_steps(model: DistributedModelParallel) -> dict[str, int]:
    """Every table's step clock in the fused optimizer's state dict."""
    return {
        key: int(value)
        for states in model.fused_optimizer.state_dict()["state"].values()
        for key, value in states.items()
        if key.endswith(".step")
    }


def _parts(sharded: Any) -> list[Any]:
    return [
        (part.metadata.shard_offsets, part.tensor.detach().clone())
        for part in sharded.local_shards()
    ]


def _region(part: Any) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + size)
        for offset, size in zip(part.metadata.shard_offsets, part.metadata.shard_sizes, strict=True)
    )


def assemble(parts_by_rank: Sequence[Mapping[str, list[Any]]]) -> dict[str, torch.Tensor]:
    """Full tensors from every rank's shards; a place that no shard covers stays NaN."""
    parts: dict[str, list[Any]] = {}
    for rank_parts in parts_by_rank:
        for name, own in rank_parts.items():
            parts.setdefault(name, []).extend(own)
    full = {}
    for name, shards in parts.items():
        shape = [
            max(offsets[axis] + tensor.shape[axis] for offsets, tensor in shards)
            for axis in range(len(shards[0][0]))
        ]
        full[name] = torch.full(shape, float("nan"))
        for offsets, tensor in shards:
            region = tuple(
                slice(offset, offset + size)
                for offset, size in zip(offsets, tensor.shape, strict=True)
            )
            full[name][region] = tensor
    return full


@dataclasses.dataclass
class Trained:
    """What a training run leaves: full weights and full states."""

    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def train_unsharded(
    steps: Sequence[Lookups],
    tables: Sequence[Table],
    update: Mapping[str, Update],
    pooled: bool = True,
    weighted: bool = False,
    gradient_scale: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The same training on full float64 tables with plain indexing and autograd.

    Args:
        steps: The batches.
        tables: The tables.
        update: For every table, the update of the touched rows.
        pooled: Pool as the table says, or one embedding per lookup.
        weighted: Use the per-sample weights.
        gradient_scale: Multiplies every gradient.
    """
    weights = {name: w.double() for name, w in initial_weights(tables).items()}
    states: dict[str, dict[str, torch.Tensor]] = {table.name: {} for table in tables}
    for number, step in enumerate(steps, start=1):
        gradients = gradients_of(step, weights, tables, pooled, weighted)
        for table in tables:
            bags = [bag for feature in table.features for bag in step.rows[feature]]
            touched = sorted({row for bag in bags for row in bag})
            state = states[table.name]
            gradient = gradients[table.name] * gradient_scale
            part = functools.partial(update[table.name], step=number)
            _update_rows(weights[table.name], gradient, touched, state, part)
    return weights


def gradients_of(
    step: Lookups,
    weights: Mapping[str, torch.Tensor],
    tables: Sequence[Table],
    pooled: bool = True,
    weighted: bool = False,
) -> dict[str, torch.Tensor]:
    """The gradients of the mean loss over a batch, in float64."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for table in tables:
        for feature in table.features:
            for bag, factors in zip(step.rows[feature], step.weights[feature], strict=True):
                rows = leaves[table.name][bag]
                if weighted:
                    rows = rows * torch.tensor(factors, dtype=torch.float64).unsqueeze(1)
                if pooled:
                    rows = rows.sum(0)
                    if table.pooling == PoolingType.MEAN:
                        rows = rows / max(len(bag), 1)
                loss = loss + loss_of(rows)
    names, inputs = zip(*leaves.items(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss / BATCH_SIZE, inputs), strict=True))


def _update_rows(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    touched: list[int],
    state: dict[str, torch.Tensor],
    update: Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], None],
) -> None:
    rows = weight[touched]
    part = {name: full[touched] for name, full in state.items()}
    update(rows, gradient[touched], part)
    weight[touched] = rows
    for name, value in part.items():
        full = state.setdefault(name, torch.zeros(len(weight), *value.shape[1:], dtype=value.dtype))
        full[touched] = value
