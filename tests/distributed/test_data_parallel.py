"""DENSE and DATA_PARALLEL tables: refused for a fused optimizer, and what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

import torchrec_ext
from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    PlanError,
)

from . import models
from .ranks import run_on_ranks
from .updates import update_of

FTRL = {"learning_rate": 0.2, "ftrl_beta": 1.0, "l1_reg": 0.05}
TABLES = models.BAG_TABLES[:2]
PLACEMENTS: dict[str, Any] = {
    "table_wise": lambda: table_wise(rank=0),
    "column_wise": lambda: column_wise(ranks=[0]),
    "row_wise": lambda: row_wise(),
    "data_parallel": lambda: data_parallel(),
}


def _build(pooled: bool, ours: bool, placement: str, fused_params: dict[str, Any]) -> Any:
    torchrec_ext.install()
    tables = TABLES if pooled else models.SEQUENCE_TABLES[:2]
    model = models.Model(tables, pooled)
    stock: Any = (
        embeddingbag.EmbeddingBagCollectionSharder
        if pooled
        else embedding.EmbeddingCollectionSharder
    )
    mine: Any = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder = (mine if ours else stock)(fused_params)
    path = "ebc" if pooled else "ec"
    sharding = construct_module_sharding_plan(
        getattr(model, path),
        {table.name: PLACEMENTS[placement]() for table in tables},
        sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    assert {parameter.compute_kernel for parameter in sharding.values()} == {"dense"}
    return models.shard(model, [sharder], ShardingPlan({path: sharding}))


@pytest.mark.parametrize("optimizer", [OptimType.FTRL, OptimType.ADAM], ids=lambda o: o.name)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_a_plan_from_fused_params_alone_is_refused(pooled, ours, placement, optimizer):
    """``construct_module_sharding_plan`` sees no optimizer on the tables and chooses dense."""
    name = {OptimType.FTRL: "FTRL", OptimType.ADAM: "AdamW"}[optimizer]
    message = (
        rf"(?s)table 't0'.*take OptimType.{optimizer.name} out of its fused_params and give the "
        rf"parameter to torchrec_ext\.optim\.{name}\ntable 't1'.*torchrec_ext\.optim\.{name}$"
    )
    with pytest.raises(PlanError, match=message):
        run_on_ranks(1, _build, pooled, ours, placement, {"optimizer": optimizer})


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torchrec_drops_fbgemms_optimizer_there(placement):
    def train() -> tuple[bool, int]:
        fused_params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.2}
        sharded = _build(True, False, placement, fused_params)
        before = [parameter.detach().clone() for parameter in sharded.parameters()]
        sharded(models.batches(1, TABLES)[0].of_rank(0, 1)).backward()
        after = list(sharded.parameters())
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        states = sharded.fused_optimizer.state_dict()["state"].values()
        return same, sum(len(state) for state in states)

    assert run_on_ranks(1, train) == [(True, 0)]


def _train_beside_a_dense_table() -> tuple[dict[str, Any], torch.Tensor]:
    """``t0`` fused and ``t1`` data parallel, as the refusal says; weights start at zero."""
    model = models.Model(TABLES)
    _apply_optimizer_in_backward(optim.FTRL, model.ebc.embedding_bags["t0"].parameters(), FTRL)
    sharder = EmbeddingBagCollectionSharder()
    plan = models.plan_for(model, [sharder], "table_wise", TABLES)
    replicated = plan.plan["ebc"]["t1"]
    replicated.sharding_type = "data_parallel"
    replicated.compute_kernel = "dense"
    replicated.sharding_spec = None
    replicated.ranks = list(range(torch.distributed.get_world_size()))
    sharded = models.shard(model, [sharder], plan)
    for table in sharded.state_dict().values():
        for part in getattr(table, "local_shards", lambda table=table: [table])():
            getattr(part, "tensor", part).zero_()
    (parameter,) = (p for name, p in sharded.named_parameters() if ".t1." in name)
    dense = optim.FTRL([parameter], **FTRL)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in models.batches(5, TABLES):
        dense.zero_grad()
        sharded(step.of_rank(rank, ranks)).backward()
        dense.step()
    state = sharded.state_dict()
    fused = {"t0": models._parts(state["ebc.embedding_bags.t0.weight"])}
    return fused, state["ebc.embedding_bags.t1.weight"].detach().clone()


def test_the_way_out_trains_as_the_fused_optimizer(monkeypatch):
    """From zero weights: FTRL's update of a row without a gradient changes nothing then."""
    answers = run_on_ranks(2, _train_beside_a_dense_table)
    zeros = {table.name: torch.zeros(table.rows, table.dim) for table in TABLES}
    monkeypatch.setattr(models, "initial_weights", lambda tables: zeros)
    updates = dict.fromkeys(("t0", "t1"), update_of(OptimType.FTRL, **FTRL))
    expected = models.train_unsharded(models.batches(5, TABLES), TABLES, updates)
    found = models.assemble([fused for fused, _ in answers]) | {"t1": answers[0][1]}
    assert torch.equal(answers[0][1], answers[1][1])
    for name, weight in expected.items():
        assert weight.count_nonzero() > 0
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)
