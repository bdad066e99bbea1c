"""The step clock in checkpoints: one scalar a table, whatever the plan."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, state_step

from . import models
from .ranks import run_on_ranks

SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")
ADAM = {"optimizer": OptimType.ADAM, "learning_rate": 0.1, "weight_decay": 0.1}
MOMENTUM = {"optimizer": OptimType.EXACT_SGD, "learning_rate": 0.1, "momentum": 0.9}


def _sharded(fused_params: dict[str, Any], sharding_type: str) -> models.DistributedModelParallel:
    model, sharder = models.Model(), EmbeddingBagCollectionSharder(dict(fused_params))
    plan = models.plan_for(model, [sharder], sharding_type)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights())
    return sharded


def _train(sharded: models.DistributedModelParallel, first: int, last: int) -> None:
    for step in models.batches(last)[first:]:
        sharded(step.of_rank(dist.get_rank(), dist.get_world_size())).backward()


def _evaluate(sharded: models.DistributedModelParallel) -> None:
    sharded.eval()
    with torch.no_grad():
        for step in models.batches(5):
            sharded(step.of_rank(dist.get_rank(), dist.get_world_size()))
    sharded.train()


def _state(sharded: models.DistributedModelParallel) -> dict[str, Any]:
    return {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}


def _save(fused_params: dict[str, Any], sharding_type: str, folder: str | None) -> Any:
    """Ten steps, an evaluation, a checkpoint if there is a folder, and ten steps more."""
    sharded = _sharded(fused_params, sharding_type)
    _train(sharded, 0, 10)
    _evaluate(sharded)
    state = _state(sharded)
    if folder is not None:
        dcp.save(state, checkpoint_id=folder)
    _train(sharded, 10, 20)
    return models.read_weights(sharded), models.read_states(sharded), models.read_steps(sharded)


def _resume(fused_params: dict[str, Any], sharding_type: str, folder: str) -> Any:
    """A new model from the checkpoint, and the last ten steps."""
    sharded = _sharded(fused_params, sharding_type)
    state = _state(sharded)
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    sharded.fused_optimizer.load_state_dict(state["optimizer"])
    _train(sharded, 10, 20)
    return models.read_weights(sharded), models.read_states(sharded), models.read_steps(sharded)


def _assert_same_bits(one: dict[str, list], other: dict[str, list]) -> None:
    assert one.keys() == other.keys()
    for name, parts in one.items():
        for (offsets, value), (other_offsets, other_value) in zip(parts, other[name], strict=True):
            assert offsets == other_offsets
            assert torch.equal(value, other_value), name


@pytest.mark.parametrize("sparse_mode", ["lazy", "dense"])
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("fused_params", [ADAM, MOMENTUM], ids=["adam", "momentum"])
def test_a_restart_changes_no_bit(fused_params, sharding_type, sparse_mode, tmp_path) -> None:
    fused_params = {**fused_params, "sparse_mode": sparse_mode}
    straight = run_on_ranks(2, _save, fused_params, sharding_type, str(tmp_path))
    resumed = run_on_ranks(2, _resume, fused_params, sharding_type, str(tmp_path))
    for (weights, states, steps), (new_weights, new_states, new_steps) in zip(
        straight, resumed, strict=True
    ):
        _assert_same_bits(weights, new_weights)
        _assert_same_bits(states, new_states)
        assert steps == new_steps
    # A rank's state dict has the tables of which it owns a part.
    assert {**resumed[0][2], **resumed[1][2]} == {f"t{t}.step": 20 for t in range(3)}


@pytest.mark.parametrize("sparse_mode", ["lazy", "dense"])
def test_the_clock_fits_any_number_of_ranks(sparse_mode, tmp_path: Path) -> None:
    """From two ranks to one and back; the weights go on as if nothing had happened."""
    fused_params = {**ADAM, "sparse_mode": sparse_mode}

    def second(source: str, target: str) -> dict[str, int]:
        sharded = _sharded(fused_params, "table_wise")
        state = _state(sharded)
        dcp.load(state, checkpoint_id=source)
        sharded.load_state_dict(state["model"])
        sharded.fused_optimizer.load_state_dict(state["optimizer"])
        steps = models.read_steps(sharded)
        dcp.save(_state(sharded), checkpoint_id=target)
        return steps

    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    straight = run_on_ranks(2, _save, fused_params, "row_wise", two)
    assert run_on_ranks(1, second, two, one) == [{f"t{t}.step": 10 for t in range(3)}]
    resumed = run_on_ranks(2, _resume, fused_params, "row_wise", one)
    expected = models.assemble([weights for weights, _, _ in straight])
    found = models.assemble([weights for weights, _, _ in resumed])
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)
    assert resumed[0][2] == {f"t{t}.step": 20 for t in range(3)}


def test_state_dict_alone_brings_rows_up_to_date() -> None:
    def compare() -> None:
        sharded = _sharded({**ADAM, "sparse_mode": "dense"}, "row_wise")
        _train(sharded, 0, 10)
        module = models.modules_by_table(sharded)["t0"]
        asleep = module.weights_host.detach().clone()
        sharded.state_dict()
        seen = models.read_weights(sharded)
        for each in models.modules_by_table(sharded).values():
            each.flush()
        _assert_same_bits(seen, models.read_weights(sharded))
        assert not torch.equal(module.weights_host, asleep)

    run_on_ranks(2, compare)


def test_a_lost_clock_would_be_seen(tmp_path: Path) -> None:
    run_on_ranks(2, _save, ADAM, "row_wise", str(tmp_path))

    def forgetful() -> Any:
        sharded = _sharded(ADAM, "row_wise")
        state = _state(sharded)
        dcp.load(state, checkpoint_id=str(tmp_path))
        sharded.load_state_dict(state["model"])
        sharded.fused_optimizer.load_state_dict(state["optimizer"])
        for module in models.modules_by_table(sharded).values():
            module.set_optimizer_step(0)
        _train(sharded, 10, 20)
        return models.read_weights(sharded)

    right = [weights for weights, _, _ in run_on_ranks(2, _resume, ADAM, "row_wise", str(tmp_path))]
    wrong = models.assemble(run_on_ranks(2, forgetful))
    assert any(
        (wrong[name] - weight).abs().max() > 1e-2 for name, weight in models.assemble(right).items()
    )


def _without_steps(sharded: models.DistributedModelParallel) -> dict[str, Any]:
    """The state dict as TorchRec has it for FBGEMM's ADAM, which leaves the clock out."""
    state_dict = sharded.fused_optimizer.state_dict()
    for states in state_dict["state"].values():
        for name in [name for name in states if name.endswith(".step")]:
            del states[name]
    return state_dict


def test_a_checkpoint_without_a_clock_needs_a_stated_step() -> None:
    def load(stated: bool) -> dict[str, int]:
        sharded = _sharded(ADAM, "row_wise")
        _train(sharded, 0, 3)
        saved = _without_steps(sharded)
        other = _sharded(ADAM, "row_wise")
        if stated:
            state_step(other.fused_optimizer, 3)
            assert models.read_steps(other) == {}
        other.fused_optimizer.load_state_dict(saved)
        for each in (sharded, other):
            models.write_weights(each, models.initial_weights())
            _train(each, 3, 6)
        for name, parts in models.read_weights(sharded).items():
            for (_, left), (_, right) in zip(parts, models.read_weights(other)[name], strict=True):
                assert torch.equal(left, right)
        return models.read_steps(other)

    assert run_on_ranks(2, load, True)[0] == {f"t{t}.step": 6 for t in range(3)}
    with pytest.raises(ValueError, match=r"table.*'t0'.*no step.*state_step"):
        run_on_ranks(1, load, False)


def test_a_load_into_a_model_with_sleeping_rows_gives_the_checkpoint() -> None:
    def compare() -> None:
        sharded = _sharded({**ADAM, "sparse_mode": "dense"}, "row_wise")
        _train(sharded, 0, 5)
        saved = copy.deepcopy(_state(sharded))
        expected = models.read_weights(sharded)
        _train(sharded, 5, 10)
        sharded.load_state_dict(saved["model"])
        sharded.fused_optimizer.load_state_dict(saved["optimizer"])
        for module in models.modules_by_table(sharded).values():
            module.flush()
        _assert_same_bits(expected, models.read_weights(sharded))

    run_on_ranks(2, compare)


def test_a_stated_step_is_withdrawn_by_a_checkpoint_that_has_one() -> None:
    def load() -> dict[str, int]:
        sharded = _sharded(ADAM, "row_wise")
        _train(sharded, 0, 2)
        saved = copy.deepcopy(sharded.fused_optimizer.state_dict())
        state_step(sharded.fused_optimizer, 3)
        with pytest.raises(ValueError, match="withdrawn"):
            sharded.fused_optimizer.load_state_dict(saved)
        # Each group of tables that shares a module has a clock of its own.
        for _ in range(2):
            with contextlib.suppress(ValueError):
                sharded.fused_optimizer.load_state_dict(saved)
        return models.read_steps(sharded)

    assert run_on_ranks(1, load) == [{f"t{t}.step": 2 for t in range(3)}]


def test_a_rank_without_tables_states_a_step_too() -> None:
    def state() -> None:
        tables = (models.Table("t0", 23, 8, ("f0",)),)
        model, sharder = models.Model(tables), EmbeddingBagCollectionSharder(dict(ADAM))
        plan = models.plan_for(model, [sharder], "table_wise", tables)
        state_step(models.shard(model, [sharder], plan).fused_optimizer, 3)

    run_on_ranks(2, state)


def test_state_step_is_for_optimizers_with_a_clock() -> None:
    def state(fused_params: dict[str, Any], step: int) -> None:
        state_step(_sharded(fused_params, "row_wise").fused_optimizer, step)

    with pytest.raises(ValueError, match="no table.*step"):
        run_on_ranks(1, state, {"optimizer": OptimType.FTRL}, 3)
    with pytest.raises(ValueError, match="step=-1"):
        run_on_ranks(1, state, ADAM, -1)
