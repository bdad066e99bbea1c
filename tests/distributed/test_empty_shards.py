"""Ranks that own no row of a table, or of any table: FBGEMM's CPU path alone crashes there."""

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

from . import models
from .ranks import run_on_ranks
from .updates import update_of

ONE_ROW = models.Table("one_row", 1, 8, ("f0", "f1"))
LAYOUTS = {
    "alone": (ONE_ROW,),
    "last": (models.Table("t0", 9, 8, ("f2",)), ONE_ROW),
    "first": (ONE_ROW, models.Table("t0", 9, 8, ("f2",))),
}


@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pooled", [True, False])
def test_a_table_with_fewer_rows_than_ranks_trains(pooled, layout, optimizer):
    tables = LAYOUTS[layout]

    def train() -> tuple[dict, list[int]]:
        model = models.Model(tables, pooled)
        sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
        sharder = sharder_type({"optimizer": optimizer, "learning_rate": 0.2})
        plan = models.plan_for(model, [sharder], "row_wise", tables)
        sharded = models.shard(model, [sharder], plan)
        models.write_weights(sharded, models.initial_weights(tables))
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for step in models.batches(5, tables):
            features = step.of_rank(rank, ranks)
            with torch.no_grad():
                sharded(features)
            sharded(features).backward()
        shards = next(iter(plan.plan.values()))["one_row"].sharding_spec.shards
        assert models.read_states(sharded).keys() or optimizer == OptimType.EXACT_SGD
        return models.read_weights(sharded), [part.shard_sizes[0] for part in shards]

    answers = run_on_ranks(2, train)
    assert answers[0][1] == [1, 0], "the test needs a shard without rows"
    found = models.assemble([weights for weights, _ in answers])
    updates = {table.name: update_of(optimizer, learning_rate=0.2) for table in tables}
    expected = models.train_unsharded(models.batches(5, tables), tables, updates, pooled)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)


def test_a_rank_without_any_table_takes_part():
    tables = (models.Table("t0", 9, 8, ("f0",)),)

    def train() -> dict:
        model = models.Model(tables)
        sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.FTRL, "learning_rate": 0.2})
        sharded = models.shard(
            model, [sharder], models.plan_for(model, [sharder], "table_wise", tables)
        )
        models.write_weights(sharded, models.initial_weights(tables))
        for step in models.batches(5, tables):
            sharded.fused_optimizer.zero_grad()
            sharded(step.of_rank(torch.distributed.get_rank(), 2)).backward()
        return models.read_weights(sharded)

    found = models.assemble(run_on_ranks(2, train))
    update = {"t0": update_of(OptimType.FTRL, learning_rate=0.2)}
    expected = models.train_unsharded(models.batches(5, tables), tables, update)
    torch.testing.assert_close(found["t0"].double(), expected["t0"], rtol=1e-5, atol=1e-5)
