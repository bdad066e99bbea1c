"""Checkpoints of tables of any width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchrec_ext import OptimType

from . import any_width, models
from .models import Table
from .ranks import run_on_ranks


def _state(sharded: Any) -> dict[str, Any]:
    states = sharded.fused_optimizer.state_dict()
    has_states = any(states["state"].values())  # DCP drops empty dicts, such as SGD's
    return {"model": sharded.state_dict()} | ({"optimizer": states} if has_states else {})


def _result(sharded: Any) -> tuple[dict, dict, dict]:
    return models.read_weights(sharded), models.read_states(sharded), models.read_steps(sharded)


def _save(optimizer: OptimType, sharding_type: str, tables: Any, pooled: bool, folder: str) -> Any:
    """Three steps, a checkpoint and three more."""
    sharded = any_width.sharded_model(optimizer, sharding_type, tables, pooled)
    any_width.train(sharded, models.batches(6, tables)[:3])
    dcp.save(_state(sharded), checkpoint_id=folder)
    any_width.train(sharded, models.batches(6, tables)[3:])
    return _result(sharded)


def _load(optimizer: OptimType, sharding_type: str, tables: Any, pooled: bool, folder: str) -> Any:
    """A new model from the checkpoint, and the last three steps."""
    sharded = any_width.sharded_model(optimizer, sharding_type, tables, pooled)
    state = _state(sharded)
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    if "optimizer" in state:
        sharded.fused_optimizer.load_state_dict(state["optimizer"])
    any_width.train(sharded, models.batches(6, tables)[3:])
    return _result(sharded)


def _assert_same(one: list, other: list, tolerance: float = 0.0) -> None:
    """Two results of two ranks, whatever the shards."""
    for kind in (0, 1):
        full, again = (models.assemble([part[kind] for part in parts]) for parts in (one, other))
        assert full.keys() == again.keys()
        for name, value in full.items():
            torch.testing.assert_close(again[name], value, rtol=tolerance, atol=tolerance)
    steps = [{**parts[0][2], **parts[1][2]} for parts in (one, other)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("sharding_type", any_width.SHARDING_TYPES)
@any_width.ALL_OPTIMIZERS
def test_a_checkpoint_changes_no_bit(optimizer, sharding_type, tmp_path):
    arguments = (optimizer, sharding_type, any_width.TABLES, True, str(tmp_path))
    straight = run_on_ranks(2, _save, *arguments)
    resumed = run_on_ranks(2, _load, *arguments)
    names = {f"{table.name}.momentum1" for table in any_width.TABLES}
    found = {name for _, states, _ in straight for name in states}
    assert names <= found or optimizer == OptimType.EXACT_SGD
    _assert_same(straight, resumed)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("target", ["table_wise", "column_wise"])
def test_a_checkpoint_fits_another_plan(target, pooled, tmp_path):
    tables = (
        any_width.TABLES if pooled else (Table("a", 23, 6, ("f0", "f1")), Table("b", 9, 6, ("f2",)))
    )
    straight = run_on_ranks(2, _save, OptimType.FTRL, "row_wise", tables, pooled, str(tmp_path))
    resumed = run_on_ranks(2, _load, OptimType.FTRL, target, tables, pooled, str(tmp_path))
    _assert_same(straight, resumed, 1e-6)  # another plan adds up bags in another order


@any_width.ALL_OPTIMIZERS
def test_a_shard_of_a_single_element(optimizer, tmp_path):
    tables = (Table("t1", 2, 1, ("f0",)),)
    arguments = (optimizer, "row_wise", tables, True, str(tmp_path))
    straight = run_on_ranks(2, _save, *arguments)
    _assert_same(straight, run_on_ranks(2, _load, *arguments))
    any_width.assert_equals_reference(
        [part[0] for part in straight], optimizer, tables, {"t1": 1}, 6
    )
