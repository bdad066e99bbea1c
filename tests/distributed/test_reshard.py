"""``reshard``: tables change their ranks and keep states, clock and hyperparameters."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecsSharder

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .planning import moved_on
from .ranks import run_on_ranks

OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
STEPS = 6


def _sharded(
    optimizer: OptimType, sharding_type: str, tables: tuple = models.BAG_TABLES
) -> tuple[models.DistributedModelParallel, EmbeddingBagCollectionSharder]:
    model = models.Model(tables)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, **HYPERPARAMETERS[optimizer]})
    sharded = models.shard(
        model, [sharder], models.plan_for(model, [sharder], sharding_type, tables)
    )
    models.write_weights(sharded, models.initial_weights(tables))
    return sharded, sharder


def _train(optimizer: OptimType, sharding_type: str, tables: tuple[str, ...]) -> dict[str, object]:
    """Trains, moving tables half way; gives weights, states, clocks and learning rates."""
    sharded, sharder = _sharded(optimizer, sharding_type)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for number, batch in enumerate(models.batches(STEPS)):
        if number == STEPS // 2:
            for group in sharded.fused_optimizer.param_groups:
                group["lr"] = 0.03
        if number == STEPS // 2 and tables:
            plan = sharded.plan.plan["ebc"]
            changed = {table: moved_on(plan[table], ranks) for table in tables}
            sharder.reshard(sharded.module.ebc, changed, sharded._env, torch.device("cpu"))
        sharded(batch.of_rank(rank, ranks)).backward()
    return {
        "weights": models.read_weights(sharded),
        "states": {
            (table, place): [state.clone() for state in states]
            for table, place, states in _local_states(sharded)
        },
        "clocks": {int(m.iter) for m in models.modules_by_table(sharded).values()},
        "rates": {m.get_learning_rate() for m in models.modules_by_table(sharded).values()}
        | {group["lr"] for group in sharded.module.ebc.fused_optimizer.param_groups},
    }


def _local_states(sharded: models.DistributedModelParallel):
    from torchrec_ext.distributed.reshard import _local_states as local_states

    for table, by_place in local_states(sharded.module.ebc).items():
        for place, states in by_place.items():
            yield table, place, states


@OPTIMIZERS
@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise"])
@pytest.mark.parametrize("tables", [("t0",), ("t0", "t2")])
def test_training_goes_on_with_the_same_bits(optimizer, sharding_type, tables) -> None:
    moved = run_on_ranks(2, _train, optimizer, sharding_type, tables)
    stayed = run_on_ranks(2, _train, optimizer, sharding_type, ())
    for name, weight in models.assemble([each["weights"] for each in stayed]).items():
        assert torch.equal(models.assemble([each["weights"] for each in moved])[name], weight)
    found, expected = (
        {key: states for each in results for key, states in each["states"].items()}
        for results in (moved, stayed)
    )
    assert found.keys() == expected.keys()
    for key, states in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(found[key], states, strict=True))
    for each in moved:
        assert each["clocks"] <= {STEPS} and each["rates"] <= {0.03}
    places = [{key for key in each["states"] if key[0] == "t0"} for each in moved]
    assert places == [{key for key in each["states"] if key[0] == "t0"} for each in stayed[::-1]]


def _reshard_after_one_rank_changed_its_rate() -> str:
    sharded, sharder = _sharded(OptimType.FTRL, "table_wise", models.SUM_TABLES)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for module in set(models.modules_by_table(sharded).values()):
        module.set_learning_rate(0.1 * (1 + rank))
    plan = sharded.plan.plan["ebc"]
    together = next(table for table in ("t0", "t2") if plan[table].ranks != plan["t1"].ranks)
    changed = {together: moved_on(plan[together], ranks)}
    try:
        sharder.reshard(sharded.module.ebc, changed, sharded._env, torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return ""


def test_tables_that_come_together_must_have_been_trained_alike() -> None:
    messages = run_on_ranks(2, _reshard_after_one_rank_changed_its_rate)
    assert any("are updated together now, but had different" in each for each in messages)


def _fbgemms_rate() -> list[float]:
    """The learning rates before a reshard and after it."""
    model, sharder = models.Model(), TorchRecsSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD})
    plan = models.plan_for(model, [sharder], "table_wise")
    sharded = models.shard(model, [sharder], plan)
    for group in sharded.fused_optimizer.param_groups:
        group["lr"] = 0.5
    sharded.fused_optimizer.zero_grad()
    rates = [{m.get_learning_rate() for m in models.modules_by_table(sharded).values()}]
    plan = sharded.plan.plan["ebc"]
    changed = {"t0": moved_on(plan["t0"], torch.distributed.get_world_size())}
    sharder.reshard(sharded.module.ebc, changed, sharded._env, torch.device("cpu"))
    rates.append({m.get_learning_rate() for m in models.modules_by_table(sharded).values()})
    return rates


def test_torchrec_forgets_the_learning_rate() -> None:
    before, after = zip(*run_on_ranks(2, _fbgemms_rate), strict=True)
    assert set().union(*before) == {0.5}
    assert 0.5 not in set().union(*after)


class _WithDense(models.Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) * self.scale


def _resharded_by_the_model(model: models.Model) -> tuple[list[str], list[str]]:
    """The tables of this rank's fused optimizer before and afterwards."""
    sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.ADAM})
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sharded(models.batches(1)[0].of_rank(rank, ranks)).backward()
    changed = {t: moved_on(sharding, ranks) for t, sharding in sharded.plan.plan["ebc"].items()}
    before = sorted(sharded.fused_optimizer.state_dict()["state"])
    sharded.reshard({"ebc": (0.0, changed)}, "ebc")
    assert set(models.read_steps(sharded).values()) == {1}
    return before, sorted(sharded.fused_optimizer.state_dict()["state"])


def test_the_models_fused_optimizer_has_the_moved_tables() -> None:
    before, after = zip(*run_on_ranks(2, _resharded_by_the_model, _WithDense()), strict=True)
    assert after == before[::-1] and before[0] != before[1]


def test_torchrec_cannot_reshard_a_model_without_dense_parameters() -> None:
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'module'"):
        run_on_ranks(2, _resharded_by_the_model, models.Model())
