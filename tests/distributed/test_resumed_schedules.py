"""A schedule that goes on after a checkpoint, as README.md has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import CosineAnnealingLR

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from . import models
from .ranks import run_on_ranks

STEPS = 6


def _start() -> tuple[Any, Any]:
    params = {"optimizer": OptimType.FTRL, "learning_rate": 0.1, "ftrl_beta": 1.0}
    model, sharder = models.Model(), EmbeddingBagCollectionSharder(params)
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
    models.write_weights(sharded, models.initial_weights())
    return sharded, CosineAnnealingLR(sharded.fused_optimizer, 2 * STEPS, eta_min=1e-3)


def _train(sharded: Any, scheduler: Any, first: int, last: int) -> None:
    for batch in models.batches(last)[first:]:
        sharded.fused_optimizer.zero_grad()
        sharded(batch.of_rank(dist.get_rank(), dist.get_world_size())).backward()
        sharded.fused_optimizer.step()
        scheduler.step()


def _saved(folder: str) -> dict[str, Any]:
    sharded, scheduler = _start()
    _train(sharded, scheduler, 0, STEPS)
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    dcp.save({**state, "scheduler": scheduler.state_dict()}, checkpoint_id=folder)
    _train(sharded, scheduler, STEPS, STEPS + 2)
    return models.read_weights(sharded)


def _resumed(folder: str, rate_too: bool) -> dict[str, Any]:
    sharded, scheduler = _start()
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    state["scheduler"] = scheduler.state_dict()
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    with pytest.warns(UserWarning, match="learning_rate was .*nor is a scheduler's learning rate"):
        sharded.fused_optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if rate_too:
        for group, rate in zip(
            sharded.fused_optimizer.param_groups, scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
    _train(sharded, scheduler, STEPS, STEPS + 2)
    return models.read_weights(sharded)


def test_it_goes_on_with_the_same_bits_where_the_rate_is_set(tmp_path) -> None:
    straight = run_on_ranks(2, _saved, str(tmp_path))
    for rate_too in (True, False):
        resumed = run_on_ranks(2, _resumed, str(tmp_path), rate_too)
        whole, again = (models.assemble(parts) for parts in (straight, resumed))
        assert all(whole[name].equal(again[name]) for name in whole) == rate_too
