"""Schedulers over the fused optimizer: an update uses the learning rate of its moment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import embeddingbag
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder
from torchrec_ext.optim import FTRL, Adam
from torchrec_ext.optimizers import HyperparameterError

from ..modules import make_module, single_step
from . import models
from .ranks import run_on_ranks

STEPS = 6
# What a loop does in each step, in this order.
LOOPS: dict[str, tuple[str, ...]] = {
    "zero_grad first": ("zero_grad", "backward", "step", "schedule"),
    "zero_grad last": ("backward", "step", "zero_grad", "schedule"),
    "without zero_grad": ("backward", "step", "schedule"),
    "scheduled first": ("schedule", "zero_grad", "backward", "step"),
    "scheduled before the step": ("zero_grad", "backward", "schedule", "step"),
    "neither step nor zero_grad": ("backward", "schedule"),
}


def _schedulers(optimizer: Any) -> dict[str, Callable[[], Any]]:
    schedulers = torch.optim.lr_scheduler
    return {
        "exponential": lambda: schedulers.ExponentialLR(optimizer, 0.7),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-3),
        "one cycle": lambda: schedulers.OneCycleLR(
            optimizer, max_lr=0.3, total_steps=STEPS + 1, cycle_momentum=False
        ),
    }


def _sharded() -> models.DistributedModelParallel:
    tables = models.BAG_TABLES
    model = models.Model(tables, pooled=True)
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": OptimType.EXACT_SGD, "learning_rate": 0.1}
    )
    plan = models.plan_for(model, [sharder], "table_wise", tables)
    return models.shard(model, [sharder], plan)


def _rates(loop: Sequence[str], scheduler: str) -> tuple[list[float], list[float]]:
    """The learning rates that updates used, and those that ``param_groups`` had at the time."""
    sharded = _sharded()
    optimizer = sharded.fused_optimizer
    schedule = _schedulers(optimizer)[scheduler]()
    module = next(iter(models.modules_by_table(sharded).values()))
    used, expected = [], []
    update = module._update

    def recording(*arguments: Any) -> None:
        update(*arguments)
        used.append(module.get_learning_rate())

    module._update = recording
    for batch in models.batches(STEPS):
        for action in loop:
            if action == "backward":
                expected.append(optimizer.param_groups[0]["lr"])
                sharded(batch.of_rank(0, 1)).backward()
            elif action == "schedule":
                schedule.step()
            else:
                getattr(optimizer, action)()
    return used, expected


@pytest.mark.parametrize("scheduler", ["exponential", "cosine", "one cycle"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_order_of_a_loop(loop, scheduler) -> None:
    used, expected = run_on_ranks(1, _rates, LOOPS[loop], scheduler)[0]
    assert used == expected
    assert len(set(used)) == STEPS


def _rates_of_fbgemm(loop: Sequence[str]) -> tuple[list[float], list[float]]:
    """As ``_rates``, for FBGEMM's SGD under TorchRec's own sharder."""
    model = models.Model(models.BAG_TABLES[:2])
    sharder = embeddingbag.EmbeddingBagCollectionSharder(
        {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    )
    plan = models.plan_for(model, [sharder], "table_wise", models.BAG_TABLES[:2])
    for sharding in plan.plan["ebc"].values():
        sharding.compute_kernel = "fused"
    sharded = models.shard(model, [sharder], plan)
    optimizer = sharded.fused_optimizer
    schedule = _schedulers(optimizer)["exponential"]()
    module = next(iter(models.modules_by_table(sharded).values()))
    used, expected = [], []
    for batch in models.batches(STEPS, models.BAG_TABLES[:2]):
        for action in loop:
            if action == "backward":
                expected.append(optimizer.param_groups[0]["lr"])
                used.append(module.get_learning_rate())
                sharded(batch.of_rank(0, 1)).backward()
            elif action == "schedule":
                schedule.step()
            else:
                getattr(optimizer, action)()
    return used, expected


@pytest.mark.parametrize("loop", ["zero_grad first", "without zero_grad"])
def test_fbgemm_is_a_step_late_without_zero_grad(loop) -> None:
    used, expected = run_on_ranks(1, _rates_of_fbgemm, LOOPS[loop])[0]
    if loop == "without zero_grad":
        expected = [expected[0], *expected[:-1]]
    assert used == pytest.approx(expected)


def _there_and_back() -> float:
    sharded = _sharded()
    optimizer = sharded.fused_optimizer
    module = next(iter(models.modules_by_table(sharded).values()))
    first, second, _ = models.batches(3)
    sharded(first.of_rank(0, 1)).backward()
    for rate in (0.5, 0.1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        if rate == 0.5:
            optimizer.zero_grad()
    sharded(second.of_rank(0, 1)).backward()
    return module.get_learning_rate()


def test_a_rate_that_comes_back_between_two_updates() -> None:
    assert run_on_ranks(1, _there_and_back) == [0.1]


def _warm_up() -> tuple[list[float], list[float]]:
    sharded = _sharded()
    optimizer = WarmupOptimizer(
        sharded.fused_optimizer,
        [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)],
        lr=0.2,
    )
    module = next(iter(models.modules_by_table(sharded).values()))
    used, expected = [], []
    for batch in models.batches(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        sharded(batch.of_rank(0, 1)).backward()
        used.append(module.get_learning_rate())
        optimizer.step()
    return used, expected


def test_torchrecs_warm_up() -> None:
    used, expected = run_on_ranks(1, _warm_up)[0]
    assert used == expected
    assert len(set(used)) > 3


class _Optimizer:
    """All that a module reads of an optimizer."""

    def __init__(self, lr: float) -> None:
        self.param_groups = [{"lr": lr}]


def test_a_rate_set_by_hand_stays_until_the_optimizers_changes() -> None:
    module = make_module(OptimType.EXACT_SGD, [(3, 4)], learning_rate=0.5)
    optimizer = _Optimizer(0.5)
    module.follow_learning_rate(optimizer)
    module.set_learning_rate(0.25)
    assert single_step(module, 1.0) == -0.25
    optimizer.param_groups[0]["lr"] = 0.125
    assert single_step(module, 1.0) == -0.375
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    assert single_step(module, 1.0) == -0.875


def test_an_illegal_rate_is_refused_when_the_update_runs() -> None:
    module = make_module(OptimType.FTRL, [(3, 4)], table_names=["user"], learning_rate=0.5)
    optimizer = _Optimizer(0.5)
    module.follow_learning_rate(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(2):
        with pytest.raises(HyperparameterError, match=r"\['user'\].*learning_rate"):
            single_step(module, 1.0)
    assert module.split_embedding_weights()[0].count_nonzero() == 0
    assert int(module.iter) == 0


def test_copies_follow_nothing() -> None:
    module = make_module(OptimType.EXACT_SGD, [(3, 4)], learning_rate=0.5)
    optimizer = _Optimizer(0.5)
    module.follow_learning_rate(optimizer)
    other = copy.deepcopy(module)
    optimizer.param_groups[0]["lr"] = 0.25
    assert single_step(module, 1.0) == -0.25
    assert single_step(other, 1.0) == -0.5


def _changed_through_the_optimizer() -> list[float]:
    sharded = _sharded()
    optimizer = sharded.fused_optimizer
    optimizer.update_hyper_parameters({"lr": 0.5})
    rates = []
    for batch in models.batches(2):
        optimizer.zero_grad()
        sharded(batch.of_rank(0, 1)).backward()
        optimizer.step()
        rates.append(next(iter(models.modules_by_table(sharded).values())).get_learning_rate())
    return [*rates, *(group["lr"] for group in optimizer.param_groups)]


def test_a_rate_given_to_the_optimizer_outlives_zero_grad() -> None:
    (rates,) = run_on_ranks(1, _changed_through_the_optimizer)
    assert set(rates) == {0.5}


def _warmed_up_and_loaded(optimizer: Any) -> tuple[float, float]:
    """The learning rate before a load of the optimizer's own state dict, and after it."""
    ours = isinstance(optimizer, OptimType)
    sharder_type = (
        EmbeddingBagCollectionSharder if ours else embeddingbag.EmbeddingBagCollectionSharder
    )
    model, sharder = models.Model(), sharder_type({"optimizer": optimizer, "learning_rate": 0.1})
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    warm_up = WarmupOptimizer(sharded.fused_optimizer, stages, lr=0.2)
    for batch in models.batches(3):
        sharded(batch.of_rank(0, 1)).backward()
        warm_up.step()
    before = warm_up.param_groups[0]["lr"]
    warm_up.load_state_dict(copy.deepcopy(warm_up.state_dict()))
    return before, sharded.fused_optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_ADAGRAD, OptimType.FTRL, OptimType.ADAM], ids=str
)
def test_torchrecs_warm_up_is_in_no_checkpoint_of_a_fused_optimizer(optimizer) -> None:
    before, after = run_on_ranks(1, _warmed_up_and_loaded, optimizer)[0]
    assert before == pytest.approx(0.2 * (0.1 + 0.9 * 3 / 4)) and after == pytest.approx(0.2 * 0.1)


def _change_that_one_of_two_refuses() -> list[float]:
    model = models.Model()
    for name, table in model.ebc.embedding_bags.items():
        optimizer = FTRL if name == "t0" else Adam
        _apply_optimizer_in_backward(optimizer, table.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
    with pytest.raises(HyperparameterError, match="'t1'.*ADAM has no hyperparameter 'l1_reg'"):
        sharded.fused_optimizer.update_hyper_parameters({"lr": 0.5, "l1_reg": 0.1})
    rates = [each.get_learning_rate() for each in models.modules_by_table(sharded).values()]
    return [*rates, *(group["lr"] for group in sharded.fused_optimizer.param_groups)]


def test_a_change_that_one_optimizer_refuses_changes_none() -> None:
    (rates,) = run_on_ranks(1, _change_that_one_of_two_refuses)
    assert set(rates) == {0.1}
