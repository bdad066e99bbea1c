"""Sharded tables of any width on the CPU, which TorchRec and FBGEMM alone refuse."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import column_wise as columns_by_rank
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    PlanError,
)

from . import any_width, models
from .models import Table
from .ranks import run_on_ranks


@pytest.mark.parametrize(
    "sharding_type", [*any_width.SHARDING_TYPES, "table_row_wise", "grid_shard"]
)
@any_width.ALL_OPTIMIZERS
def test_bags_equal_the_unsharded_reference(optimizer, sharding_type):
    # Under grid_shard TorchRec gets means wrong, and [rows] states of a table with one row.
    tables = (
        any_width.SUM_TABLES
        if sharding_type == "grid_shard"
        else (*any_width.TABLES, any_width.ONE_ROW)
    )

    def train() -> dict:
        sharded = any_width.sharded_model(optimizer, sharding_type, tables)
        any_width.train(sharded, models.batches(6, tables))
        return models.read_weights(sharded)

    found = run_on_ranks(2, train)
    any_width.assert_equals_reference(
        found, optimizer, tables, any_width.shard_widths(sharding_type, tables), 6
    )


@pytest.mark.parametrize(
    ("sharding_type", "dim"), [("table_wise", 7), ("row_wise", 1), ("column_wise", 6)]
)
@any_width.ALL_OPTIMIZERS
def test_sequences_equal_the_unsharded_reference(optimizer, sharding_type, dim):
    tables = (Table("a", 23, dim, ("f0", "f1")), Table("b", 9, dim, ("f2",)))

    def train() -> dict:
        sharded = any_width.sharded_model(optimizer, sharding_type, tables, pooled=False)
        any_width.train(sharded, models.batches(6, tables))
        return models.read_weights(sharded)

    found = run_on_ranks(2, train)
    shards = any_width.shard_widths(sharding_type, tables)
    any_width.assert_equals_reference(found, optimizer, tables, shards, 6, pooled=False)


@pytest.mark.parametrize("sharding_type", any_width.SHARDING_TYPES)
def test_weighted_bags_equal_the_unsharded_reference(sharding_type):
    def train() -> dict:
        sharded = any_width.sharded_model(
            OptimType.FTRL, sharding_type, any_width.SUM_TABLES, weighted=True
        )
        any_width.train(sharded, models.batches(6, any_width.SUM_TABLES), weighted=True)
        return models.read_weights(sharded)

    found = run_on_ranks(2, train)
    shards = any_width.shard_widths(sharding_type, any_width.SUM_TABLES)
    any_width.assert_equals_reference(
        found, OptimType.FTRL, any_width.SUM_TABLES, shards, 6, weighted=True
    )


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise"])
def test_variable_batch_sizes_train_as_repeated_examples_do(sharding_type):
    """Every feature's distinct bags, and which of them each example has (TorchRec's VBE)."""
    tables = (Table("a", 9, 3, ("f0", "f1")), Table("b", 7, 1, ("f2",)), Table("c", 8, 6, ("f3",)))
    features = ["f0", "f1", "f2", "f3"]

    def train(variable: bool) -> dict:
        sharded = any_width.sharded_model(OptimType.FTRL, sharding_type, tables)
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            bags = [
                [
                    torch.randint(rows, (length,), generator=generator)
                    for length in torch.randint(0, 4, (distinct,), generator=generator).tolist()
                ]
                for rows, distinct in zip((9, 9, 7, 8), (3 + rank, 2, 4 - rank, 1), strict=True)
            ]
            inverse = torch.stack([torch.arange(4) % len(of_feature) for of_feature in bags])
            keywords: dict = {"inverse_indices": (features, inverse)}
            keywords["stride_per_key_per_rank"] = [[len(of_feature)] for of_feature in bags]
            if not variable:
                pairs = zip(bags, inverse.tolist(), strict=True)
                bags, keywords = [[own[i] for i in numbers] for own, numbers in pairs], {}
            flat = [bag for of_feature in bags for bag in of_feature]
            lengths = torch.tensor([len(bag) for bag in flat])
            batch = KeyedJaggedTensor(features, torch.cat(flat), lengths=lengths, **keywords)
            sharded.module.ebc(batch).values().square().sum().backward()
        return models.read_weights(sharded)

    found, expected = (models.assemble(run_on_ranks(2, train, each)) for each in (True, False))
    for name, weight in expected.items():
        assert not torch.equal(weight, models.initial_weights(tables)[name])
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_both_kinds_of_collection_in_one_model():
    bags = (Table("bag", 9, 3, ("f0", "f1")), Table("one", 7, 1, ("f2",)))
    sequences = (Table("sequence", 8, 7, ("f3",)),)

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = models.Model(bags)
            self.sequences = models.Model(sequences, pooled=False)

        def forward(self, first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> torch.Tensor:
            return self.bags(first) + self.sequences(second)

    def train() -> dict:
        model = Both()
        sharders = [any_width.sharder_of(OptimType.FTRL, pooled) for pooled in (True, False)]
        plan = models.plan_for(model, sharders, "row_wise", (*bags, *sequences))
        sharded = models.shard(model, sharders, plan)
        start = models.initial_weights(bags) | models.initial_weights(sequences)
        models.write_weights(sharded, start)
        rank = dist.get_rank()
        for first, second in zip(
            models.batches(6, bags), models.batches(6, sequences), strict=True
        ):
            sharded(first.of_rank(rank, 2), second.of_rank(rank, 2)).backward()
        return models.read_weights(sharded)

    found = run_on_ranks(2, train)
    for tables, pooled in ((bags, True), (sequences, False)):
        names = {table.name for table in tables}
        own = [{name: parts for name, parts in rank.items() if name in names} for rank in found]
        shards = any_width.shard_widths("row_wise", tables)
        any_width.assert_equals_reference(own, OptimType.FTRL, tables, shards, 6, pooled)


@pytest.mark.parametrize("sizes", [(4, 3), (1, 6), (5, 2)])
def test_a_plan_by_hand_may_cut_anywhere(sizes):
    tables = (Table("t7", 9, 7, ("f0", "f1")),)

    def train() -> dict:
        model, sharder = models.Model(tables), any_width.sharder_of(OptimType.ADAM, True)
        plan = construct_module_sharding_plan(
            model.ebc,
            {"t7": columns_by_rank(size_per_rank=list(sizes), compute_kernel="fused")},
            sharder,
            local_size=2,
            world_size=2,
            device_type="cpu",
        )
        sharded = models.shard(model, [sharder], ShardingPlan({"ebc": plan}))
        models.write_weights(sharded, models.initial_weights(tables))
        any_width.train(sharded, models.batches(6, tables))
        (kernel,) = models.kernels_of(sharded)
        assert list(kernel.emb_module.dims) == [sizes[dist.get_rank()]]
        return models.read_weights(sharded)

    any_width.assert_equals_reference(run_on_ranks(2, train), OptimType.ADAM, tables, {"t7": 7}, 6)


@pytest.mark.parametrize("pooled", [True, False])
def test_fbgemms_optimizers_keep_the_errors_that_they_had(pooled):
    def build() -> None:
        torchrec_ext.install()
        tables = (Table("t6", 9, 6, ("f0",)),)
        model = models.Model(tables, pooled)
        sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
        sharder = sharder_type({"optimizer": EmbOptimType.EXACT_ADAGRAD})
        models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise", tables))

    with pytest.raises(AssertionError, match="6.*not divisible by 4|multiple of 4, but got 6"):
        run_on_ranks(1, build)


def test_sequences_in_column_shards_of_two_widths_are_refused_by_table():
    tables = (Table("a", 9, 6, ("f0",)), Table("b", 9, 6, ("f1",)), Table("c", 9, 6, ("f2",)))

    def build() -> None:
        model, sharder = (
            models.Model(tables, pooled=False),
            any_width.sharder_of(OptimType.FTRL, False),
        )
        shardings = {
            "a": table_wise(rank=0, compute_kernel="fused"),
            "b": columns_by_rank(size_per_rank=[3, 3], compute_kernel="fused"),
            "c": columns_by_rank(size_per_rank=[4, 2], compute_kernel="fused"),
        }
        plan = construct_module_sharding_plan(
            model.ec, shardings, sharder, local_size=2, world_size=2, device_type="cpu"
        )
        models.shard(model, [sharder], ShardingPlan({"ec": plan}))

    message = "^table 'c': a column shard of 4 columns beside one of 3 of table 'b'"
    with pytest.raises(PlanError, match=message):
        run_on_ranks(2, build)
