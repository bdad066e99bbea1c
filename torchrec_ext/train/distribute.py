"""Optimizers on tables, the sharding plan, and the model under DistributedModelParallel."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import optim as torchrec_optim
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_ext import optim
from torchrec_ext.command.errors import UserError
from torchrec_ext.command.ranks import Ranks
from torchrec_ext.command.sections import OptimizerConfig
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, PlanError
from torchrec_ext.distributed.planner import EmbeddingShardingPlanner, ShardMemory
from torchrec_ext.optim_type import OptimType
from torchrec_ext.train.config import Config, DenseOptimizerConfig
from torchrec_ext.train.model import Model, deep_tables, wide_tables
from torchrec_ext.train.tables import WIDE, initialise_tables

# FBGEMM's optimizers under the names of the configuration. The class tells TorchRec's planner how
# much memory the states take; the enum decides what runs.
FBGEMM_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], EmbOptimType]] = {
    "fbgemm_exact_sgd": (torchrec_optim.SGD, EmbOptimType.EXACT_SGD),
    "fbgemm_exact_adagrad": (torchrec_optim.Adagrad, EmbOptimType.EXACT_ADAGRAD),
    "fbgemm_exact_rowwise_adagrad": (
        torchrec_optim.RowWiseAdagrad,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    ),
}

# Two-level types only on request: the planner's estimates do not tell them from these.
DEFAULT_SHARDING_TYPES = ("table_wise", "column_wise", "row_wise")


@dataclass(frozen=True)
class Distributed:
    """A model ready to train.

    Attributes:
        model: The model under DistributedModelParallel.
        optimizer: Steps the dense parameters and the fused optimizers' learning rates.
        plan: Where each table lives.
        memory: What that takes, shard by shard.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    plan: ShardingPlan
    memory: tuple[ShardMemory, ...]


def distribute(model: Model, config: Config, ranks: Ranks) -> Distributed:
    """Shard a model over all ranks and give its tables their initial weights.

    Args:
        model: A model whose tables are on the meta device; it is taken over.
        config: The run's configuration.
        ranks: All ranks, each of which must call this.

    Raises:
        AgreedError: On every rank, if no sharding plan satisfies ``config.sharding``.
    """
    for tables, optimizer in (
        (wide_tables(model), config.optimizer),
        (deep_tables(model), config.optimizer_of_factors),
    ):
        if tables is not None:
            _apply(optimizer, tables)
    sharder = EmbeddingBagCollectionSharder()
    plan, memory = ranks.on_first(lambda: _plan(model, sharder, config, ranks))

    def shard() -> DistributedModelParallel:
        try:
            return DistributedModelParallel(
                model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
            )
        except PlanError as error:
            raise UserError(f"sharding: {_one_line(error)}") from error

    sharded = ranks.agree(shard)
    initialise_tables(sharded, config.seed, getattr(config.model, "wide_start", "zeros"))
    dense = _dense_optimizer(sharded, config.dense_optimizer)
    return Distributed(sharded, CombinedOptimizer([sharded.fused_optimizer, dense]), plan, memory)


def describe_plan(plan: ShardingPlan, config: Config) -> list[list[str]]:
    """Give the plan as rows of a table, header first."""
    rows = [["table", "rows", "dim", "optimizer", "sharding", "kernel", "ranks"]]
    for module in plan.plan.values():
        assert isinstance(module, EmbeddingModuleShardingPlan)
        for table, sharding in module.items():
            shards = sharding.sharding_spec.shards
            count = max(s.shard_offsets[0] + s.shard_sizes[0] for s in shards)
            dim = max(s.shard_offsets[1] + s.shard_sizes[1] for s in shards)
            wide = table.startswith(WIDE)
            rows.append(
                [
                    table,
                    str(count),
                    str(dim),
                    (config.optimizer if wide else config.optimizer_of_factors).type,
                    sharding.sharding_type,
                    sharding.compute_kernel,
                    ",".join(str(rank) for rank in sharding.ranks or ()),
                ]
            )
    return rows


def _apply(config: OptimizerConfig, tables: EmbeddingBagCollection) -> None:
    keywords: dict[str, object] = dict(config.hyperparameters)
    keywords["lr"] = keywords.pop("learning_rate")
    cls: type[torch.optim.Optimizer]
    if config.ours == OptimType.ADAM:
        # torch.optim's names: the class says how weight decays.
        keywords["betas"] = keywords.pop("beta1"), keywords.pop("beta2")
        coupled = keywords.pop("weight_decay_mode") == "L2"
        cls = optim.Adam if coupled else optim.AdamW
    elif config.ours is not None:
        cls = optim.classes()[config.ours]
    else:
        cls, keywords["optimizer"] = FBGEMM_CLASSES[config.type]
    for parameter in tables.parameters():
        apply_optimizer_in_backward(cls, [parameter], dict(keywords))


def _plan(
    model: nn.Module, sharder: EmbeddingBagCollectionSharder, config: Config, ranks: Ranks
) -> tuple[ShardingPlan, tuple[ShardMemory, ...]]:
    tables = {
        table.name: table.embedding_dim
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection)
        for table in module.embedding_bag_configs()
    }
    unknown = [name for name in config.sharding.tables if name not in tables]
    if unknown:
        raise UserError(
            f"sharding.tables.{unknown[0]}: the model has no such table; it has {', '.join(tables)}"
        )
    constraints = {
        name: ParameterConstraints(
            sharding_types=_sharding_types(config, name),
            # Any other kernel would train the table without its fused optimizer.
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            # The planner never makes columns narrower than this, by default 128.
            min_partition=4 if dim > 4 else None,
        )
        for name, dim in tables.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=ranks.world_size,
            local_world_size=ranks.local_world_size,
            compute_device="cpu",
            # What the host has, so that tables that do not fit are refused, not killed.
            ddr_cap=_host_memory() // ranks.local_world_size,
        ),
        batch_size=config.train.batch_size // ranks.world_size,
        constraints=constraints,
        debug=False,
    )
    try:
        return planner.plan(model, [sharder]), planner.memory
    # TorchRec raises a plain RuntimeError where constraints leave a table no choice at all.
    except (PlannerError, RuntimeError) as error:
        raise UserError(
            f"sharding: no plan for {ranks.world_size} rank(s) satisfies sharding.types and "
            f"sharding.tables; allow other types. The planner says: "
            f"{_one_line(error).partition(' To debug')[0]}"
        ) from error


def _host_memory() -> int:
    """Give the physical memory of this host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _sharding_types(config: Config, table: str) -> list[str]:
    if table in config.sharding.tables:
        return [config.sharding.tables[table]]
    return list(config.sharding.types or DEFAULT_SHARDING_TYPES)


def _dense_optimizer(
    model: DistributedModelParallel, config: DenseOptimizerConfig
) -> KeyedOptimizerWrapper:
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(
        parameters,
        lambda dense: torch.optim.Adam(
            dense, lr=config.learning_rate, weight_decay=config.weight_decay
        ),
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
