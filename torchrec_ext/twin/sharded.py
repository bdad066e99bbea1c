"""A twin of sharded collections under DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed import DistributedModelParallel, embedding, embeddingbag
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

from torchrec_ext import distributed
from torchrec_ext.distributed.fused_optimizer import ours_in
from torchrec_ext.twin.compare import Difference, Values, compare
from torchrec_ext.twin.description import Batch, Description

_DATA_TYPE = {"fp32": DataType.FP32, "fp16": DataType.FP16}


class _BagSharder(embeddingbag.EmbeddingBagCollectionSharder):
    """TorchRec's, with the sharding types that it hides on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        ours = distributed.EmbeddingBagCollectionSharder
        return [*super().sharding_types(compute_device_type), *ours.more_cpu_sharding_types]


class ShardedTwin:
    """Our sharded collection and TorchRec's with FBGEMM's optimizer, from one description.

    An ``EmbeddingBagCollection``, or an ``EmbeddingCollection`` without pooling. Needs an
    initialised process group; every rank makes the same calls.

    Args:
        description: What both are made from; batches differ from rank to rank.
        sharding_types: By table, or one for all tables.

    Attributes:
        ours: Our model.
        theirs: TorchRec's.
    """

    def __init__(self, description: Description, sharding_types: Mapping[str, str] | str) -> None:
        """Builds and shards both models."""
        self.description = description
        if isinstance(sharding_types, str):
            sharding_types = {table.name: sharding_types for table in description.tables}
        self._sharding_types = sharding_types
        pooled = description.pooling != "none"
        common = {**description.clipping, "stochastic_rounding": False}
        ours = {"optimizer": description.optimizer, **description.hyperparameters, **common}
        theirs = {
            "optimizer": description.optimizer.counterpart,
            **description.fbgemm_hyperparameters,
            **common,
        }
        if pooled:
            self.ours = self._shard(distributed.EmbeddingBagCollectionSharder(fused_params=ours))
            self.theirs = self._shard(_BagSharder(fused_params=theirs))
        else:
            self.ours = self._shard(distributed.EmbeddingCollectionSharder(fused_params=ours))
            self.theirs = self._shard(embedding.EmbeddingCollectionSharder(fused_params=theirs))
        self._start_alike()

    def run(self, steps: int) -> Iterator[Difference]:
        """Trains both and compares this rank's outputs and shards after every step."""
        for step, batch in enumerate(self.description.batches(steps, dist.get_rank()), start=1):
            outputs = [self._forward(model, batch) for model in (self.ours, self.theirs)]
            gradient = batch.gradient(outputs[0])
            yield from compare(
                step,
                self._trained(self.ours, outputs[0], gradient),
                self._trained(self.theirs, outputs[1], gradient),
            )

    def _collection(self) -> nn.Module:
        arguments = [
            {
                "name": table.name,
                "num_embeddings": table.rows,
                "embedding_dim": table.dim,
                "feature_names": list(table.feature_names),
                "data_type": _DATA_TYPE[self.description.weights_precision],
            }
            for table in self.description.tables
        ]
        meta = torch.device("meta")
        if self.description.pooling == "none":
            return EmbeddingCollection([EmbeddingConfig(**a) for a in arguments], device=meta)
        pooling = PoolingType.SUM if self.description.pooling == "sum" else PoolingType.MEAN
        return EmbeddingBagCollection(
            [EmbeddingBagConfig(**a, pooling=pooling) for a in arguments],
            is_weighted=self.description.weighted,
            device=meta,
        )

    def _shard(self, sharder: Any) -> DistributedModelParallel:
        constraints = {
            name: ParameterConstraints(
                sharding_types=[kind], compute_kernels=["fused"], min_partition=4
            )
            for name, kind in self._sharding_types.items()
        }
        world = dist.get_world_size()
        topology = Topology(world_size=world, compute_device="cpu", local_world_size=world)
        planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
        model = self._collection()
        group = dist.group.WORLD
        plan = planner.collective_plan(model, [sharder], group)
        return DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            device=torch.device("cpu"),
            plan=plan,
            sharders=[sharder],
        )

    def _start_alike(self) -> None:
        whole = dict(
            zip(
                (table.name for table in self.description.tables),
                self.description.weights(),
                strict=True,
            )
        )
        for model in (self.ours, self.theirs):
            for key, sharded in model.state_dict().items():
                for shard in sharded.local_shards():
                    (row, column), (rows, columns) = (
                        shard.metadata.shard_offsets,
                        shard.metadata.shard_sizes,
                    )
                    table = whole[key.split(".")[-2]]
                    shard.tensor.copy_(table[row : row + rows, column : column + columns])
        mine, other = (self._states(model) for model in (self.ours, self.theirs))
        for key, state in mine.items():
            other[key].copy_(state)

    def _forward(self, model: DistributedModelParallel, batch: Batch) -> Tensor:
        weights = None if batch.weights is None else batch.weights.clone()
        features = KeyedJaggedTensor(
            keys=self.description.features,
            values=batch.indices.clone(),
            lengths=batch.lengths,
            weights=weights,
        )
        output = model(features).wait()
        if self.description.pooling != "none":
            return output.values()
        return torch.cat([output[name].values() for name in self.description.features])

    def _trained(self, model: DistributedModelParallel, output: Tensor, gradient: Tensor) -> Values:
        values = {("output", ""): output.detach().clone()}
        output.backward(gradient)
        for key, sharded in model.state_dict().items():
            for number, shard in enumerate(sharded.local_shards()):
                values["weight", self._place(key.split(".")[-2], number)] = shard.tensor
        for (name, place), state in self._states(model).items():
            values[name, place] = state if state.dim() == 2 else state[:, None]
        return values

    def _states(self, model: DistributedModelParallel) -> dict[tuple[str, str], Tensor]:
        states = {}
        if model is self.ours:  # whose state dict has the form of checkpoints
            for part in ours_in(model.fused_optimizer):
                part.module.flush()
                for saved in part.saved_tables.values():
                    for number, of_shard in enumerate(saved.local_states()):
                        place = self._place(saved.name, number)
                        states.update({(name, place): state for name, state in of_shard.items()})
            return states
        for table in model.fused_optimizer.state_dict()["state"].values():
            for key, sharded in table.items():
                table_name, _, name = key.rpartition(".")
                for number, shard in enumerate(sharded.local_shards()):
                    states[name, self._place(table_name, number)] = shard.tensor
        return states

    def _place(self, table: str, shard: int) -> str:
        return f"{table}, rank {dist.get_rank()}, shard {shard}"
