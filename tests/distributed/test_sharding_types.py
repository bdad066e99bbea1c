"""Every sharding type, with FBGEMM's Adagrad, our FTRL and our Adam, against float64.

The tables are those that sharding types find hard: uneven rows, several column shards on a rank, a
feature that two tables read, two features on one table, and for ours one row for all ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import PoolingType
from torchrec.distributed import embedding, embeddingbag

from torchrec_ext import OptimType
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    PlanError,
)

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks
from .updates import update_of

TABLES = (
    models.Table("t0", 23, 8, ("f0", "f3")),
    models.Table("t1", 11, 16, ("f1",), PoolingType.MEAN),
    models.Table("t2", 7, 8, ("f0", "f4")),
)
SUM_TABLES = tuple(dataclasses.replace(table, pooling=PoolingType.SUM) for table in TABLES)
ONE_ROW = models.Table("one_row", 1, 8, ("f5",))
COLUMNS: dict[str, tuple[Any, OptimType]] = {
    "stock": (EmbOptimType.EXACT_ADAGRAD, OptimType.EXACT_ADAGRAD),
    "FTRL": (OptimType.FTRL, OptimType.FTRL),
    "ADAM": (OptimType.ADAM, OptimType.ADAM),
}
ROW_TYPES = ("row_wise", "table_row_wise", "grid_shard")
SHARDING_TYPES = ("table_wise", "column_wise", "table_column_wise", *ROW_TYPES)
TWO_LEVEL = ("table_row_wise", "table_column_wise", "grid_shard")
RANKS_OF_A_HOST = 2


class AllTypes(embeddingbag.EmbeddingBagCollectionSharder):
    """TorchRec's sharder, with the types that it does not offer on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SHARDING_TYPES)


@dataclasses.dataclass
class Case:
    """A model to train, and how."""

    column: str
    sharding_type: str
    tables: tuple[models.Table, ...]
    weighted: bool = False
    pooled: bool = True
    other_type: str | None = None  # of the last table

    def sharder(self) -> Any:
        given, optimizer = COLUMNS[self.column]
        fused_params = {"optimizer": given, **HYPERPARAMETERS[optimizer]}
        if self.column == "stock":
            stock = AllTypes if self.pooled else embedding.EmbeddingCollectionSharder
            return stock(fused_params)
        ours = EmbeddingBagCollectionSharder if self.pooled else EmbeddingCollectionSharder
        return ours(fused_params)

    def train(self) -> tuple[dict, dict[str, list[list[int]]]]:
        """This rank's shards after training, and every table's shard sizes."""
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        sharders = [self.sharder()]
        model = models.Model(self.tables, self.pooled, self.weighted)
        local = RANKS_OF_A_HOST if self.sharding_type in TWO_LEVEL else None
        plan = models.plan_for(model, sharders, self.sharding_type, self.tables, local)
        (sharding,) = plan.plan.values()
        for parameter in sharding.values():
            parameter.compute_kernel = "fused"
        if self.other_type is not None:
            other = models.plan_for(model, sharders, self.other_type, self.tables)
            (other_sharding,) = other.plan.values()
            sharding[self.tables[-1].name] = other_sharding[self.tables[-1].name]
        sharded = models.shard(model, sharders, plan)
        models.write_weights(sharded, models.initial_weights(self.tables))
        for step in models.batches(5, self.tables):
            features = step.of_rank(rank, ranks, self.weighted)
            with torch.no_grad():
                sharded(features)
            sharded(features).backward()
        shards = {
            name: [list(shard.shard_sizes) for shard in parameter.sharding_spec.shards]
            for name, parameter in sharding.items()
        }
        return models.read_weights(sharded), shards

    def expected(self) -> dict[str, torch.Tensor]:
        """What float64 training without sharding gives."""
        optimizer = COLUMNS[self.column][1]
        update = update_of(optimizer, **HYPERPARAMETERS[optimizer])
        updates = dict.fromkeys((table.name for table in self.tables), update)
        steps = models.batches(5, self.tables)
        return models.train_unsharded(steps, self.tables, updates, self.pooled, self.weighted)

    def check(self, ranks: int) -> dict[str, list[list[int]]]:
        """Trains on ranks, compares, and gives every table's shard sizes."""
        local = RANKS_OF_A_HOST if self.sharding_type in TWO_LEVEL else None
        answers = run_on_ranks(ranks, self.train, local_world_size=local)
        found = models.assemble([weights for weights, _ in answers])
        expected = self.expected()
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)
        return answers[0][1]


def _tables(column: str, sharding_type: str, weighted: bool) -> tuple[models.Table, ...]:
    # TorchRec is wrong about means under grid_shard, and see WRONG_MEANS.
    tables = SUM_TABLES if weighted or sharding_type == "grid_shard" else TABLES
    if tables is TABLES and sharding_type in ROW_TYPES:
        tables = (*TABLES[:2], dataclasses.replace(TABLES[2], features=("f4",)))
    # FBGEMM fails on a shard without rows.
    return tables if column == "stock" else (*tables, ONE_ROW)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("column", COLUMNS)
def test_bags_train_as_the_reference(column, sharding_type, ranks):
    shards = Case(column, sharding_type, _tables(column, sharding_type, False)).check(ranks)
    if "column" in sharding_type:
        assert shards["t1"] == [[11, 4]] * 4
    if sharding_type == "row_wise":
        assert len({rows for rows, _ in shards["t0"]}) == 2, "the test needs uneven rows"
    if sharding_type in ROW_TYPES and column != "stock":
        assert 0 in [rows for rows, _ in shards["one_row"]] or sharding_type == "grid_shard"


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("column", COLUMNS)
def test_weighted_bags_train_as_the_reference(column, sharding_type):
    Case(column, sharding_type, _tables(column, sharding_type, True), weighted=True).check(2)


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise"])
@pytest.mark.parametrize("column", COLUMNS)
def test_sequences_train_as_the_reference(column, sharding_type):
    tables = tuple(dataclasses.replace(table, dim=8) for table in SUM_TABLES)
    if column != "stock":
        tables = (*tables, ONE_ROW)
    Case(column, sharding_type, tables, pooled=False).check(2)


@pytest.mark.parametrize("sharding_type", ROW_TYPES)
@pytest.mark.parametrize("column", ["FTRL", "ADAM"])
def test_ranks_without_any_row_take_part(column, sharding_type):
    Case(column, sharding_type, (ONE_ROW,)).check(4)


MEAN = models.Table("mean", 23, 8, ("f0",), PoolingType.MEAN)
SUM = models.Table("sum", 11, 8, ("f1",))
WRONG_MEANS = {
    "another sharding type": ("row_wise", (MEAN, SUM), "table_wise"),
    "a shared feature": ("row_wise", (MEAN, dataclasses.replace(SUM, features=("f0",))), None),
    "the same by hosts": ("table_row_wise", (MEAN, SUM), "column_wise"),
}


@pytest.mark.parametrize("layout", WRONG_MEANS)
def test_torchrec_divides_sums_by_lengths_beside_means_of_rows(layout):
    sharding_type, tables, other = WRONG_MEANS[layout]
    case = Case("stock", sharding_type, tables, other_type=other)
    found = models.assemble([weights for weights, _ in run_on_ranks(2, case.train)])
    expected = case.expected()
    assert (found["sum"].double() - expected["sum"]).abs().max() > 0.01


@pytest.mark.parametrize("layout", WRONG_MEANS)
@pytest.mark.parametrize("column", ["FTRL", "ADAM"])
def test_sums_beside_means_of_rows_are_refused(column, layout):
    sharding_type, tables, other = WRONG_MEANS[layout]
    case = Case(column, sharding_type, tables, other_type=other)
    with pytest.raises(PlanError, match=r"^table 'sum':[^\n]* mean-pooled table 'mean'[^\n]*$"):
        run_on_ranks(2, case.train)


def test_torchrec_is_wrong_about_means_under_grid_shard():
    case = Case("stock", "grid_shard", (MEAN,))
    found = models.assemble([weights for weights, _ in run_on_ranks(2, case.train)])
    assert (found["mean"].double() - case.expected()["mean"]).abs().max() > 0.01


def test_means_that_share_a_feature_are_right():
    tables = (MEAN, dataclasses.replace(MEAN, name="other", rows=11))
    Case("FTRL", "row_wise", tables).check(2)


def test_fbgemm_cannot_have_a_rank_without_rows():
    with pytest.raises(RuntimeError, match=r"weights\[0\] must be a GPU or MTIA tensor"):
        run_on_ranks(2, Case("stock", "row_wise", (ONE_ROW,)).train)


def test_torchrec_fails_where_hosts_are_counted_apart():
    """``LOCAL_WORLD_SIZE`` is 4, ``Topology`` counts 2 ranks on a host."""
    case = Case("stock", "table_row_wise", SUM_TABLES[:2])
    with pytest.raises(IndexError, match="list index out of range"):
        run_on_ranks(4, case.train)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("sharding_type", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_torchrec_shards_no_sequences_on_two_levels(column, sharding_type):
    tables = (models.Table("t0", 23, 8, ("f0",)),)
    case = Case(column, "table_wise", tables, pooled=False)

    def build() -> None:
        sharders = [case.sharder()]
        model = models.Model(tables, pooled=False)
        plan = models.plan_for(model, sharders, "row_wise", tables)
        plan.plan["ec"]["t0"].sharding_type = sharding_type
        plan.plan["ec"]["t0"].compute_kernel = "fused"
        models.shard(model, sharders, plan)

    with pytest.raises(ValueError, match=f"Sharding not supported {sharding_type}"):
        run_on_ranks(2, build)
