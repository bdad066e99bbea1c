"""FTRL's extensions in sharded models: initial weights, checkpoints, shards of columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import _apply_optimizer_in_backward

from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, derive_optimizer_states

from . import models
from .ranks import run_on_ranks
from .updates import by_column_shard, update_of

SHARDING_TYPES = pytest.mark.parametrize(
    "sharding_type", ["table_wise", "row_wise", "column_wise", "table_row_wise"]
)
TABLES = models.SUM_TABLES
PRESERVING: dict[str, Any] = {
    "optimizer": OptimType.FTRL,
    "learning_rate": 0.1,
    "ftrl_beta": 1.0,
    "l1_reg": 0.2,
    "initial_accumulator_value": 0.1,
    "preserve_initial_weight": True,
}


def _sharded(sharding_type: str, fused_params: dict[str, Any]) -> models.DistributedModelParallel:
    model, sharder = models.Model(TABLES), EmbeddingBagCollectionSharder(dict(fused_params))
    return models.shard(model, [sharder], models.plan_for(model, [sharder], sharding_type, TABLES))


def _train(sharded: models.DistributedModelParallel, first: int, last: int, scale: float) -> None:
    for step in models.batches(last, TABLES)[first:]:
        (sharded(step.of_rank(dist.get_rank(), dist.get_world_size())) * scale).backward()


def _marks(states: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Where linear says that there was no update, as pairs for ``assemble``."""
    return {
        name: [(offsets, ((v == 0.0) & v.signbit()).float()) for offsets, v in parts]
        for name, parts in states.items()
        if name.endswith("momentum1")
    }


def _largest_move(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> float:
    moves = [
        (one - other).abs().flatten()
        for name in before
        for (_, one), (_, other) in zip(before[name], after[name], strict=True)
    ]
    return float(torch.cat([*moves, torch.zeros(1)]).max())


def _adagrad_and_ftrl(sharding_type: str) -> list[Any]:
    common = {"learning_rate": 0.1, "initial_accumulator_value": 0.1}
    found = []
    for given in (
        {"optimizer": OptimType.FTRL, "preserve_initial_weight": True},
        {"optimizer": OptimType.EXACT_ADAGRAD, "eps": 0.0},
    ):
        sharded = _sharded(sharding_type, {**common, **given})
        models.write_weights(sharded, models.initial_weights(TABLES))
        _train(sharded, 0, 200, 1.0)
        found.append(models.read_weights(sharded))
    return found


@SHARDING_TYPES
def test_without_regularisation_it_is_adagrad(sharding_type) -> None:
    answers = run_on_ranks(2, _adagrad_and_ftrl, sharding_type)
    ftrl, adagrad = (models.assemble([answer[k] for answer in answers]) for k in (0, 1))
    start = models.initial_weights(TABLES)
    for name, expected in adagrad.items():
        error = (ftrl[name] - expected).abs() / expected.abs().clamp(min=1.0)
        assert error.max() <= 1e-5
        assert (expected - start[name]).abs().max() > 0.5


def _keep(sharding_type: str, fused_params: dict[str, Any], source: str) -> float:
    """How far weights move in steps without gradients, from wherever they came."""
    sharded = _sharded(sharding_type, fused_params)
    if source != "init_parameters":
        models.write_weights(sharded, models.initial_weights(TABLES))
    if source == "weights of a checkpoint":
        loaded = _sharded(sharding_type, fused_params)
        loaded.load_state_dict(sharded.state_dict())
        sharded = loaded
    before = models.read_weights(sharded)
    assert any((part.abs() > 0.01).any() for parts in before.values() for _, part in parts)
    _train(sharded, 0, 3, 0.0)
    return _largest_move(before, models.read_weights(sharded))


@SHARDING_TYPES
@pytest.mark.parametrize("source", ["init_parameters", "written", "weights of a checkpoint"])
def test_initial_weights_are_kept(sharding_type, source) -> None:
    assert max(run_on_ranks(2, _keep, sharding_type, PRESERVING, source)) <= 1e-6
    plain = {**PRESERVING, "preserve_initial_weight": False}
    if source == "weights of a checkpoint":
        with pytest.raises(RuntimeError, match="the update would discard them"):
            run_on_ranks(2, _keep, sharding_type, plain, source)
    else:
        assert max(run_on_ranks(2, _keep, sharding_type, plain, source)) > 0.01


def _keep_by_class() -> float:
    model = models.Model(TABLES)
    given = {name: value for name, value in PRESERVING.items() if name != "optimizer"}
    _apply_optimizer_in_backward(optim.FTRL, model.parameters(), given)
    sharder = EmbeddingBagCollectionSharder()
    plan = models.plan_for(model, [sharder], "row_wise", TABLES)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(TABLES))
    before = models.read_weights(sharded)
    _train(sharded, 0, 3, 0.0)
    return _largest_move(before, models.read_weights(sharded))


def test_initial_weights_are_kept_where_a_class_names_the_optimizer() -> None:
    assert max(run_on_ranks(2, _keep_by_class)) <= 1e-6


def _save(sharding_type: str, folder: str) -> Any:
    sharded = _sharded(sharding_type, PRESERVING)
    models.write_weights(sharded, models.initial_weights(TABLES))
    _train(sharded, 0, 1, 1.0)
    marks = _marks(models.read_states(sharded))
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return marks, *_finish(sharded)


def _finish(sharded: models.DistributedModelParallel) -> Any:
    """Other hyperparameters, under which rows have their first update."""
    for module in _modules(sharded):
        module.update_hyper_parameters({"learning_rate": 0.03, "l1_reg": 0.1})
    for group in sharded.fused_optimizer.param_groups:
        group["lr"] = 0.03
    _train(sharded, 1, 8, 1.0)
    dims = [len({dim for _, dim, _, _ in m.embedding_specs}) for m in _modules(sharded)]
    return models.read_weights(sharded), models.read_states(sharded), dims


def _modules(sharded: models.DistributedModelParallel) -> set[Any]:
    return set(models.modules_by_table(sharded).values())


def _resume(sharding_type: str, folder: str) -> Any:
    sharded = _sharded(sharding_type, PRESERVING)
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    sharded.fused_optimizer.load_state_dict(state["optimizer"])
    marks = _marks(models.read_states(sharded))
    return marks, *_finish(sharded)


@pytest.mark.parametrize(
    "saved, loaded",
    [
        ("table_wise", "table_wise"),
        ("row_wise", "row_wise"),
        ("column_wise", "column_wise"),
        ("table_wise", "row_wise"),
        ("row_wise", "column_wise"),
    ],
)
def test_rows_not_yet_updated_go_through_checkpoints(saved, loaded, tmp_path: Path) -> None:
    """A row's first update comes after the load, under other hyperparameters."""
    straight = run_on_ranks(2, _save, saved, str(tmp_path))
    resumed = run_on_ranks(2, _resume, loaded, str(tmp_path))
    marks = models.assemble([answer[0] for answer in straight])
    assert (
        0
        < sum(float(each.sum()) for each in marks.values())
        < sum(each.numel() for each in marks.values())
    )
    for part in range(3):
        one, other = (
            models.assemble([answer[part] for answer in each]) for each in (straight, resumed)
        )
        for name, expected in one.items():
            if saved == loaded:
                assert torch.equal(other[name], expected)
            else:  # gradients are summed in another order
                assert (other[name] - expected).abs().max() <= 2e-5
    if saved == "row_wise":
        assert max(dims for answer in straight for dims in answer[3]) > 1


def _load_weights_into_trained_model(derives: bool, multiplied: bool) -> float:
    plain = {**PRESERVING, "preserve_initial_weight": False, "multiply_linear_by_lr": multiplied}
    sharded = _sharded("row_wise", plain)
    _train(sharded, 0, 3, 1.0)
    other = _sharded("row_wise", plain)
    models.write_weights(other, models.initial_weights(TABLES))
    sharded.load_state_dict(other.state_dict())
    before = models.read_weights(sharded)
    if derives:
        derive_optimizer_states(sharded.fused_optimizer)
    _train(sharded, 3, 6, 0.0)
    return _largest_move(before, models.read_weights(sharded))


@pytest.mark.parametrize("multiplied", [False, True])
def test_linear_derived_after_a_load_of_weights_alone(multiplied) -> None:
    assert max(run_on_ranks(2, _load_weights_into_trained_model, True, multiplied)) <= 1e-6
    with pytest.raises(RuntimeError, match="the update would discard them"):
        run_on_ranks(2, _load_weights_into_trained_model, False, multiplied)


def _train_group_lasso(sharding_type: str) -> dict[str, list[Any]]:
    given = {"learning_rate": 0.2, "ftrl_beta": 0.5, "l1_reg": 0.05, "l21_reg": 0.2}
    sharded = _sharded(sharding_type, {"optimizer": OptimType.FTRL, **given})
    models.write_weights(sharded, models.initial_weights(TABLES))
    _train(sharded, 0, 10, 1.0)
    return models.read_weights(sharded)


@SHARDING_TYPES
def test_group_lasso_sees_the_columns_of_a_shard(sharding_type) -> None:
    found = models.assemble(run_on_ranks(2, _train_group_lasso, sharding_type))
    update = update_of(OptimType.FTRL, learning_rate=0.2, ftrl_beta=0.5, l1_reg=0.05, l21_reg=0.2)
    expected = {}
    for name, each in (("row", update), ("shard", by_column_shard(update, 4))):
        updates = dict.fromkeys((table.name for table in TABLES), each)
        expected[name] = models.train_unsharded(models.batches(10, TABLES), TABLES, updates)
    own, other = ("shard", "row") if sharding_type == "column_wise" else ("row", "shard")
    for table, weights in found.items():
        assert (weights - expected[own][table]).abs().max() <= 1e-5
    differences = [(found[t] - expected[other][t]).abs().max() for t in found]
    assert max(differences) > 1e-3
