"""Weights that are loaded without their optimizer's states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .planning import moved_on
from .ranks import run_on_ranks

PRESERVING = {"preserve_initial_weight": True}


def _sharded(
    optimizer: OptimType, sharding_type: str = "row_wise", **more: Any
) -> models.DistributedModelParallel:
    params = {"optimizer": optimizer, **HYPERPARAMETERS[optimizer], **more}
    model, sharder = models.Model(), EmbeddingBagCollectionSharder(params)
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], sharding_type))
    models.write_weights(sharded, models.initial_weights())
    return sharded


def _step(sharded: models.DistributedModelParallel, number: int) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sharded(models.batches(number + 1)[number].of_rank(rank, ranks)).backward()


def _refused(trained: bool) -> None:
    source, target = _sharded(OptimType.FTRL), _sharded(OptimType.FTRL)
    _step(source, 0)
    if trained:
        _step(target, 1)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    before = models.read_weights(target)
    with torch.no_grad():
        target(models.batches(1)[0].of_rank(torch.distributed.get_rank(), 2))
    with pytest.raises(RuntimeError, match=r"'t1'.*without.*derive_optimizer_states"):
        _step(target, 2)
    _assert_same(before, models.read_weights(target))


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, parts in one.items():
        for (_, value), (_, found) in zip(parts, other[name], strict=True):
            assert torch.equal(value, found)


@pytest.mark.parametrize("trained", [False, True])
def test_ftrl_refuses_to_discard_them(trained) -> None:
    run_on_ranks(2, _refused, trained)


def _whole(states_first: bool) -> None:
    source, target = _sharded(OptimType.FTRL), _sharded(OptimType.FTRL)
    _step(source, 0)
    _step(target, 1)
    weights = copy.deepcopy(source.state_dict())
    states = copy.deepcopy(source.fused_optimizer.state_dict())
    loads = [
        lambda: target.load_state_dict(weights),
        lambda: target.fused_optimizer.load_state_dict(states),
    ]
    for load in reversed(loads) if states_first else loads:
        load()
    for each in (source, target):
        _step(each, 2)
    _assert_same(models.read_weights(source), models.read_weights(target))


@pytest.mark.parametrize("states_first", [False, True])
def test_with_states_in_either_order_training_goes_on(states_first) -> None:
    run_on_ranks(2, _whole, states_first)


def _later() -> None:
    source, target = _sharded(OptimType.FTRL), _sharded(OptimType.FTRL)
    target.fused_optimizer.load_state_dict(copy.deepcopy(source.fused_optimizer.state_dict()))
    _step(target, 0)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    with pytest.raises(RuntimeError, match="without their optimizer's states"):
        _step(target, 1)


def test_states_that_were_loaded_before_an_update_do_not_count() -> None:
    run_on_ranks(2, _later)


def _fine(optimizer: OptimType, trained: bool, **more: Any) -> None:
    source, target = _sharded(optimizer, **more), _sharded(optimizer, **more)
    _step(source, 0)
    if trained:
        _step(target, 0)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    _step(target, 1)


def test_other_optimizers_and_new_rows_that_preserve_go_on() -> None:
    run_on_ranks(2, _fine, OptimType.ADAM, True)
    run_on_ranks(2, _fine, OptimType.FTRL, False, **PRESERVING)
    with pytest.raises(RuntimeError, match="without their optimizer's states"):
        run_on_ranks(2, _fine, OptimType.FTRL, True, **PRESERVING)


def _moved_between_load_and_update(load_first: bool, **more: Any) -> None:
    source = _sharded(OptimType.FTRL, sharding_type="table_wise")
    target = _sharded(OptimType.FTRL, sharding_type="table_wise", **more)
    _step(source, 0)
    _step(target, 1)
    if load_first:
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    for each in (source, target):
        changed = {"t0": moved_on(each.plan.plan["ebc"]["t0"], torch.distributed.get_world_size())}
        sharder = EmbeddingBagCollectionSharder()
        sharder.reshard(each.module.ebc, changed, each._env, torch.device("cpu"))
        each._optim = each._init_optim(each.module)  # as model.reshard() does
    if not load_first:
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    with pytest.raises(RuntimeError, match="without.*derive_optimizer_states"):
        _step(target, 2)


@pytest.mark.parametrize("load_first", [False, True])
def test_tables_that_move_to_other_ranks_keep_what_was_loaded(load_first) -> None:
    run_on_ranks(2, _moved_between_load_and_update, load_first, **PRESERVING)
