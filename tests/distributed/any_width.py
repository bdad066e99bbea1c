"""Sharded models whose tables have any width, for the tests of several files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import PoolingType
from torchrec.distributed.types import ShardingPlan

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

from . import models
from .models import Table
from .test_training import OPTIMIZERS
from .updates import by_column_shard, update_of

# The least width of a column shard: 2 cuts 6 into three, 9 into three, and leaves 7 whole.
COLUMNS = 2
WIDTHS = {1: 1, 2: 2, 3: 3, 5: 5, 6: 2, 7: 7, 8: 4, 9: 3}  # of a column shard, by dim
SUM_TABLES = (
    Table("t1", 23, 1, ("f0", "f1")),
    Table("t2", 6, 2, ("f2",)),
    Table("t3", 11, 3, ("f3",)),
    Table("t5", 1, 5, ("f4",)),
    Table("t6", 13, 6, ("f5", "f6")),
    Table("t7", 5, 7, ("f7",)),
    Table("t8", 6, 8, ("f8",)),
    Table("t9", 9, 9, ("f9",)),
)
ONE_ROW = Table("one_row", 1, 5, ("g0",))
TABLES = (*SUM_TABLES, Table("mean", 9, 7, ("f10",), PoolingType.MEAN))
SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")
ALL_OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)


def sharder_of(optimizer: OptimType, pooled: bool) -> Any:
    sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    return sharder_type({"optimizer": optimizer, **OPTIMIZERS[optimizer]})


def sharded_model(
    optimizer: OptimType,
    sharding_type: str,
    tables: tuple[Table, ...],
    pooled: bool = True,
    weighted: bool = False,
) -> Any:
    model = models.Model(tables, pooled, weighted)
    sharder = sharder_of(optimizer, pooled)
    plan = models.plan_for(model, [sharder], sharding_type, tables, columns=COLUMNS)
    _assert_widths(plan, sharding_type, tables)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(tables))
    return sharded


def _assert_widths(plan: ShardingPlan, sharding_type: str, tables: tuple[Table, ...]) -> None:
    (sharding,) = plan.plan.values()
    cut = sharding_type in ("column_wise", "grid_shard")
    for table in tables:
        found = {part.shard_sizes[1] for part in sharding[table.name].sharding_spec.shards}
        assert found == {WIDTHS[table.dim] if cut else table.dim}


def train(sharded: Any, steps: list[models.Lookups], weighted: bool = False) -> None:
    for step in steps:
        sharded(step.of_rank(dist.get_rank(), dist.get_world_size(), weighted)).backward()


def assert_equals_reference(
    found: list[dict],
    optimizer: OptimType,
    tables: tuple[Table, ...],
    widths: dict[str, int],
    steps: int,
    pooled: bool = True,
    weighted: bool = False,
) -> None:
    """The same training in float64; ``widths`` are those of the column shards, by table."""
    update = update_of(optimizer, **OPTIMIZERS[optimizer])
    updates = {table.name: by_column_shard(update, widths[table.name]) for table in tables}
    expected = models.train_unsharded(
        models.batches(steps, tables), tables, updates, pooled, weighted
    )
    weights = models.assemble(found)
    assert weights.keys() == expected.keys()
    for table in tables:
        weight, exact = weights[table.name], expected[table.name]
        assert weight.shape == (table.rows, table.dim)
        assert not torch.equal(weight, models.initial_weights(tables)[table.name])
        torch.testing.assert_close(weight.double(), exact, rtol=1e-5, atol=1e-5)


def shard_widths(sharding_type: str, tables: tuple[Table, ...]) -> dict[str, int]:
    cut = sharding_type in ("column_wise", "grid_shard")
    return {table.name: WIDTHS[table.dim] if cut else table.dim for table in tables}
