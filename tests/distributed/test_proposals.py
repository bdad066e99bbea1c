"""A planner without constraints gives tables with mean pooling what sharding accepts."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import PoolingType
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, PlanError
from torchrec_ext.optim import FTRL

from . import models
from .ranks import run_on_ranks

# The cheapest plan has the last one alone under row_wise.
TABLES = (
    models.Table("t0", 1000, 64, ("f0",), PoolingType.MEAN),
    models.Table("t1", 100000, 64, ("f1",)),
    models.Table("t2", 50, 16, ("f2",), PoolingType.MEAN),
)


def _types(by_class: bool, constraints: dict[str, ParameterConstraints] | None) -> dict[str, str]:
    """The sharding types of a plan that was sharded."""
    model = models.Model(TABLES)
    if by_class:
        _apply_optimizer_in_backward(FTRL, model.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder(None if by_class else {"optimizer": OptimType.FTRL})
    ranks = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(ranks, "cpu", local_world_size=ranks), constraints=constraints
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    models.shard(model, [sharder], plan)
    return {table: sharding.sharding_type for table, sharding in plan.plan["ebc"].items()}


@pytest.mark.parametrize("by_class", [False, True])
def test_a_plan_without_constraints_can_be_sharded(by_class) -> None:
    for types in run_on_ranks(2, _types, by_class, None):
        assert types.keys() == {"t0", "t1", "t2"}


def test_a_choice_fits_what_a_constraint_asks_for() -> None:
    constraints = {"t2": ParameterConstraints(sharding_types=["row_wise"])}
    for types in run_on_ranks(2, _types, False, constraints):
        assert set(types.values()) == {"row_wise"}


def test_a_mixture_that_constraints_ask_for_is_left_to_the_error_that_explains_it() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"]),
        "t1": ParameterConstraints(sharding_types=["table_wise"]),
        "t2": ParameterConstraints(sharding_types=["row_wise"]),
    }
    with pytest.raises(PlanError, match="table_wise beside the mean-pooled table 't2'"):
        run_on_ranks(2, _types, False, constraints)
