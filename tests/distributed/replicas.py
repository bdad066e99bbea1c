"""2D parallelism on gloo ranks, which TorchRec keeps to CUDA by an assertion and a placement."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingStrategy

from .models import BAG_TABLES, COLUMNS_PER_SHARD, Table, kernels_of

# What TorchRec's source says, and what it must say for the CPU.
_EDITS = {
    "__init__": [
        ('device.type == "cuda" or device.type == "mtia"', "True"),
        ("super().__init__(", "super(DMPCollection, self).__init__("),
    ],
    "_remap_sharding_plan": [("/{self._device.type}:{shard_rank % get_local_size()}", "/cpu")],
}


@functools.cache
def allow_cpu() -> None:
    """Edits DMPCollection in this process, a rank's fork; fails where the source is another."""
    for name, edits in _EDITS.items():
        source = textwrap.dedent(inspect.getsource(getattr(DMPCollection, name)))
        for before, after in edits:
            assert before in source, f"DMPCollection.{name} has no {before!r}"
            source = source.replace(before, after)
        defined: dict[str, Any] = {}
        exec(source, vars(model_parallel), defined)  # noqa: S102
        setattr(DMPCollection, name, defined[name])


def replicate(
    model: torch.nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    sharding_type: str,
    tables: Sequence[Table] = BAG_TABLES,
    ranks_per_replica: int = 2,
    strategy: ShardingStrategy = ShardingStrategy.DEFAULT,
) -> DMPCollection:
    """The model in replicas, each sharded over some of the ranks."""
    allow_cpu()
    topology = Topology(
        world_size=ranks_per_replica, compute_device="cpu", local_world_size=ranks_per_replica
    )
    constraint = ParameterConstraints(
        sharding_types=[sharding_type], min_partition=COLUMNS_PER_SHARD
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, constraints={table.name: constraint for table in tables}
    )
    assert dist.group.WORLD is not None
    return DMPCollection(
        module=model,
        device=torch.device("cpu"),
        plan=planner.collective_plan(model, list(sharders), dist.group.WORLD),
        world_size=dist.get_world_size(),
        sharding_group_size=ranks_per_replica,
        global_pg=dist.group.WORLD,
        sharders=list(sharders),
        sharding_strategy=strategy,
    )


@dataclasses.dataclass
class Shard:
    """A part of a table on this rank, as views."""

    table: str
    offsets: tuple[int, ...]
    weight: torch.Tensor
    states: list[torch.Tensor]

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """The same for the replicas of a shard, and for no other."""
        return self.table, self.offsets


def shards_of(model: DistributedModelParallel, copied: bool = False) -> Iterator[Shard]:
    """This rank's shards, or copies, every row up to date."""
    for kernel in kernels_of(model):
        module = copy.deepcopy(kernel.emb_module) if copied else kernel.emb_module
        states = [list(of_table.values()) for of_table in module.get_optimizer_state()]
        weights = module.split_embedding_weights()
        tables = kernel.config.embedding_tables
        for table, weight, of_table in zip(tables, weights, states, strict=True):
            offsets = tuple(table.local_metadata.shard_offsets)
            yield Shard(table.name, offsets, weight, of_table)


def write_tables(model: DistributedModelParallel, tables: Mapping[str, torch.Tensor]) -> None:
    """Copies full tables into this rank's shards."""
    for shard in shards_of(model):
        rows, columns = (
            slice(offset, offset + size)
            for offset, size in zip(shard.offsets, shard.weight.shape, strict=True)
        )
        shard.weight.copy_(tables[shard.table][rows, columns])


Copies = dict[tuple[str, tuple[int, ...]], list[torch.Tensor]]


def copies_of(model: DistributedModelParallel) -> Copies:
    """``[weight, *states]`` of each of this rank's shards; rows of the model sleep on."""
    return {shard.place: [shard.weight, *shard.states] for shard in shards_of(model, copied=True)}
