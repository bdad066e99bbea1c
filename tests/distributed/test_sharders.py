"""Our sharders offer a planner what trains; without our optimizers they are TorchRec's."""

import pickle

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import embedding, embeddingbag

import torchrec_ext
from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    hook,
    plan,
)

from . import models
from .ranks import run_on_ranks

FTRL = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}
PAIRS = {
    EmbeddingBagCollectionSharder: embeddingbag.EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder: embedding.EmbeddingCollectionSharder,
}
DEVICES = ("cpu", "cuda", "meta")


def test_sharding_types_with_ours():
    bags = EmbeddingBagCollectionSharder(FTRL)
    everything = set(plan.SHARDING_TYPES)
    assert set(bags.sharding_types("cpu")) == set(bags.sharding_types("cuda")) == everything
    sequences = EmbeddingCollectionSharder(FTRL)
    three = {"table_wise", "column_wise", "row_wise"}
    assert set(sequences.sharding_types("cpu")) == set(sequences.sharding_types("cuda")) == three


@pytest.mark.parametrize("sharder_type", PAIRS)
def test_compute_kernels_with_ours(sharder_type):
    sharder = sharder_type(FTRL)
    for sharding_type in sharder.sharding_types("cuda"):
        assert sharder.compute_kernels(sharding_type, "cpu") == ["fused"]
        on_cuda = ["fused", "fused_uvm", "fused_uvm_caching"]
        assert sharder.compute_kernels(sharding_type, "cuda") == on_cuda


@pytest.mark.parametrize("fused_params", [None, {}, {"optimizer": EmbOptimType.EXACT_ADAGRAD}])
@pytest.mark.parametrize("sharder_type", PAIRS)
def test_without_ours_they_offer_what_torchrec_offers(sharder_type, fused_params):
    ours, theirs = sharder_type(fused_params), PAIRS[sharder_type](fused_params)
    assert isinstance(ours, PAIRS[sharder_type])
    assert ours.fused_params == theirs.fused_params
    for device in DEVICES:
        assert ours.sharding_types(device) == theirs.sharding_types(device)
        for sharding_type in theirs.sharding_types(device):
            expected = theirs.compute_kernels(sharding_type, device)
            assert ours.compute_kernels(sharding_type, device) == expected


@pytest.mark.parametrize("pooled", [True, False])
def test_a_class_on_one_table_restricts_its_collection_and_no_other(pooled):
    tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
    with_class, without = models.Model(tables, pooled), models.Model(tables, pooled)
    parameter = next(p for n, p in with_class.named_parameters() if ".t1." in n)
    _apply_optimizer_in_backward(optim.FTRL, [parameter], {"lr": 0.1})
    sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)()

    def offered(model: models.Model) -> list[str]:
        sharder.shardable_parameters(model.ebc if pooled else model.ec)
        return sharder.sharding_types("cpu")

    assert "data_parallel" in offered(without)
    assert "data_parallel" not in offered(with_class)
    assert "data_parallel" in offered(without)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("by_class", [True, False])
def test_the_planner_left_alone_chooses_a_plan_that_trains(pooled, by_class, ranks):
    def train() -> bool:
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
        if by_class:
            _apply_optimizer_in_backward(optim.FTRL, model.parameters(), {"lr": 0.1})
        sharder = sharder_type(None if by_class else FTRL)
        sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], None, tables))
        models.write_weights(sharded, models.initial_weights(tables))
        rank = torch.distributed.get_rank()
        for step in models.batches(2, tables):
            sharded(step.of_rank(rank, ranks)).backward()
        return models.read_weights(sharded)

    weights = models.assemble(run_on_ranks(ranks, train))
    tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
    before = models.initial_weights(tables)
    assert weights.keys() == before.keys()
    assert all(not torch.equal(weights[name], before[name]) for name in weights)


@pytest.mark.parametrize("sharder_type", PAIRS)
def test_a_sharder_copies_the_callers_dict_and_pickles(sharder_type):
    fused_params = dict(FTRL)
    sharder = sharder_type(fused_params)
    fused_params["learning_rate"] = 0.9
    assert sharder.fused_params == FTRL
    assert pickle.loads(pickle.dumps(sharder)).fused_params == FTRL


def test_a_sharder_puts_the_hook_in_place_and_back_in_place():
    def build() -> bool:
        model = models.Model()
        sharder = EmbeddingBagCollectionSharder(FTRL)
        assert hook.in_place()
        sharding_plan = models.plan_for(model, [sharder], "table_wise")
        torchrec_ext.uninstall()
        sharded = models.shard(model, [sharder], sharding_plan)
        return all(hasattr(m, "optim_type") for m in models.modules_by_table(sharded).values())

    assert run_on_ranks(1, build) == [True]


def test_deduplication_cannot_drop_bad_indices():
    fused_params = {"optimizer": OptimType.FTRL, "drop_bad_indices": True}
    with pytest.raises(ValueError, match="drop_bad_indices=True with use_index_dedup=True.*Leave"):
        EmbeddingCollectionSharder(fused_params, use_index_dedup=True)
    EmbeddingCollectionSharder(fused_params, use_index_dedup=False)
