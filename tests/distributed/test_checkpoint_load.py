"""Loads through ``torch.distributed.checkpoint``: refused on every rank before anything is read."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, async_save, state_step

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks

FTRL, ADAM, ADAGRAD = OptimType.FTRL, OptimType.ADAM, OptimType.EXACT_ADAGRAD
FBGEMM = EmbOptimType.EXACT_ADAGRAD
FBGEMMS = HYPERPARAMETERS[ADAGRAD]
WIDER = tuple(models.Table(t.name, t.rows, t.dim * 2, t.features) for t in models.SUM_TABLES)
STEPS = 2


def _sharded(
    optimizer: Any, tables: Any = models.SUM_TABLES, **hyperparameters: Any
) -> models.DistributedModelParallel:
    given = {**HYPERPARAMETERS.get(optimizer, FBGEMMS), **hyperparameters}
    model = models.Model(tables)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, **given})
    plan = models.plan_for(model, [sharder], "table_wise", tables)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(tables))
    return sharded


def _train(sharded: models.DistributedModelParallel, first: int, last: int) -> None:
    for batch in models.batches(last)[first:]:
        sharded(batch.of_rank(dist.get_rank(), dist.get_world_size())).backward()


def _state(sharded: models.DistributedModelParallel) -> dict[str, Any]:
    return {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}


def _tensors(sharded: models.DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Copies of the local weights and states."""
    states = sharded.fused_optimizer.state_dict()["state"].values()
    entries = {**sharded.state_dict(), **{k: v for each in states for k, v in each.items()}}
    return {
        f"{key} {number}": part.tensor.clone()
        for key, value in entries.items()
        if isinstance(value, ShardedTensor)
        for number, part in enumerate(value.local_shards())
    }


def _save(optimizer: Any, folder: str, drop: str = "") -> None:
    sharded = _sharded(optimizer)
    _train(sharded, 0, STEPS)
    state = _state(sharded)
    for states in state["optimizer"]["state"].values():
        for key in [key for key in states if drop and key.endswith(drop)]:
            del states[key]
    dcp.save(state, checkpoint_id=folder)


def _refusal(optimizer: Any, folder: str, tables: Any = models.SUM_TABLES) -> str:
    """The error of this rank, after which weights and states are what they were."""
    sharded = _sharded(optimizer, tables)
    before = _tensors(sharded)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(_state(sharded), checkpoint_id=folder)
    after = _tensors(sharded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    return "\n".join(f"rank {rank}: {cause}" for rank, (cause, _) in caught.value.failures.items())


@pytest.mark.parametrize(
    "written, read, drop, message",
    [
        (FTRL, ADAGRAD, "", "'t0': .* written with OptimType.FTRL, but the table has .*ADAGRAD"),
        (ADAM, FTRL, "", "'t0': the checkpoint was written with OptimType.ADAM"),
        (FTRL, FBGEMM, "", r"'t0': .* OptimType.FTRL and has .*'accum'\], but the optimizer here"),
        (FBGEMM, FTRL, "", r"'t0': .* has the states \['momentum1'\], but OptimType.FTRL has"),
        (FTRL, FTRL, ".accum", r"'t0': .* the states \['momentum1'\], but OptimType.FTRL has"),
        (ADAM, ADAM, ".step", r"'t0': .* has the states .* but OptimType.ADAM has .*'step'\]"),
        (FBGEMM, ADAM, "", r"'t0': the checkpoint has no step.*state_step\("),
    ],
)
def test_what_does_not_fit_is_refused_by_name_on_every_rank(written, read, drop, message, tmp_path):
    run_on_ranks(2, _save, written, str(tmp_path), drop)
    one, other = run_on_ranks(2, _refusal, read, str(tmp_path))
    assert one == other

    assert re.search(message, one, re.DOTALL), one


def test_another_width_is_refused_by_name_on_every_rank(tmp_path):
    run_on_ranks(2, _save, FTRL, str(tmp_path))
    one, other = run_on_ranks(2, _refusal, FTRL, str(tmp_path), WIDER)
    assert one == other
    assert (
        "table 't0': state 'momentum1' has shape (23, 8) in the checkpoint, expected (23, 16)"
        in one
    )


def _load(sharded: models.DistributedModelParallel, folder: str) -> None:
    state = _state(sharded)
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    sharded.fused_optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize(
    "written, read",
    [
        (FBGEMM, ADAGRAD),
        (ADAGRAD, FBGEMM),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD),
        (OptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
    ids=str,
)
def test_fbgemms_checkpoints_load_into_ours_and_back(written, read, tmp_path):
    def straight() -> dict[str, torch.Tensor]:
        sharded = _sharded(written)
        _train(sharded, 0, STEPS)
        dcp.save(_state(sharded), checkpoint_id=str(tmp_path))
        saved = _tensors(sharded)
        _train(sharded, STEPS, 2 * STEPS)
        return {"saved": saved, "after": _tensors(sharded)}

    def resumed() -> dict[str, torch.Tensor]:
        sharded = _sharded(read)
        _load(sharded, str(tmp_path))
        saved = _tensors(sharded)
        _train(sharded, STEPS, 2 * STEPS)
        return {"saved": saved, "after": _tensors(sharded)}

    for one, other in zip(run_on_ranks(2, straight), run_on_ranks(2, resumed), strict=True):
        assert one["saved"].keys() == other["saved"].keys()
        for key, value in one["saved"].items():
            assert torch.equal(value, other["saved"][key])
        for key, value in one["after"].items():
            torch.testing.assert_close(other["after"][key], value, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_of_fbgemms_adam_loads_with_a_stated_step(tmp_path):
    """The layout that FBGEMM writes on a GPU: two moments, no clock, no description."""

    def straight() -> dict[str, torch.Tensor]:
        sharded = _sharded(ADAM)
        _train(sharded, 0, STEPS)
        state = _state(sharded)
        for states in state["optimizer"]["state"].values():
            for key in [key for key in states if key.endswith((".step", "_hyperparameters"))]:
                del states[key]
        dcp.save(state, checkpoint_id=str(tmp_path))
        _train(sharded, STEPS, 2 * STEPS)
        return _tensors(sharded)

    def resumed() -> dict[str, torch.Tensor]:
        sharded = _sharded(ADAM)
        state_step(sharded.fused_optimizer, STEPS)
        _load(sharded, str(tmp_path))
        _train(sharded, STEPS, 2 * STEPS)
        return _tensors(sharded)

    for one, other in zip(run_on_ranks(2, straight), run_on_ranks(2, resumed), strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_other_hyperparameters_are_told_by_name_and_not_loaded(tmp_path):
    run_on_ranks(2, _save, FTRL, str(tmp_path))

    def load(**hyperparameters: Any) -> tuple[list[str], float]:
        sharded = _sharded(FTRL, **hyperparameters)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _load(sharded, str(tmp_path))
        module = next(iter(models.modules_by_table(sharded).values()))
        told = [str(each.message) for each in caught if "hyperparameters" in str(each.message)]
        return told, module.hyperparameters["l1_reg"]

    told = run_on_ranks(2, load, l1_reg=0.3)
    for (message,), l1_reg in told:
        assert "l1_reg was 0.1 and is 0.3 now" in message
        assert l1_reg == 0.3
    assert all(any(f"'t{t}'" in message for (message,), _ in told) for t in range(3))
    assert [told for told, _ in run_on_ranks(2, load)] == [[], []]


def test_an_asynchronous_save_holds_the_state_of_its_call(tmp_path):
    def straight() -> dict[str, torch.Tensor]:
        sharded = _sharded(ADAM)
        _train(sharded, 0, STEPS)
        saved = _tensors(sharded)
        future = async_save(_state(sharded), checkpoint_id=str(tmp_path))
        _train(sharded, STEPS, 2 * STEPS)  # while it is being written
        future.result()
        return saved

    def resumed() -> dict[str, torch.Tensor]:
        sharded = _sharded(ADAM)
        _load(sharded, str(tmp_path))
        return _tensors(sharded)

    for one, other in zip(run_on_ranks(2, straight), run_on_ranks(2, resumed), strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_asynchronous_saves_may_be_started_before_the_last_is_done(tmp_path):
    saves = 4

    def straight() -> list[dict[str, torch.Tensor]]:
        sharded, states, futures = _sharded(ADAM), [], []
        for number in range(saves):
            _train(sharded, number, number + 1)
            states.append(_tensors(sharded))
            futures.append(async_save(_state(sharded), checkpoint_id=str(tmp_path / str(number))))
        for future in futures:
            future.result()
        return states

    def resumed() -> list[dict[str, torch.Tensor]]:
        sharded, states = _sharded(ADAM), []
        for number in range(saves):
            _load(sharded, str(tmp_path / str(number)))
            states.append(_tensors(sharded))
        return states

    for before, after in zip(
        run_on_ranks(2, straight, timeout=20.0), run_on_ranks(2, resumed), strict=True
    ):
        for one, other in zip(before, after, strict=True):
            assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_learning_rate_that_comes_with_its_param_groups_is_no_difference():
    def load() -> set[float]:
        source, target = _sharded(FTRL), _sharded(FTRL)
        for each in (source, target):
            each.fused_optimizer.save_param_groups(True)
        for group in source.fused_optimizer.param_groups:
            group["lr"] = 0.25
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*hyperparameters")
            target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
        _train(target, 0, 1)
        return {each.get_learning_rate() for each in models.modules_by_table(target).values()}

    assert run_on_ranks(2, load) == [{0.25}, {0.25}]


def test_a_rank_without_tables_loads_at_any_depth(tmp_path):
    tables = models.SUM_TABLES[:1]

    def nested(sharded: models.DistributedModelParallel) -> dict[str, Any]:
        return {"run": {"state": _state(sharded), "step": STEPS}}

    def save() -> dict[str, torch.Tensor]:
        sharded = _sharded(ADAM, tables)
        for batch in models.batches(STEPS, tables):
            sharded(batch.of_rank(dist.get_rank(), 2)).backward()
        dcp.save(nested(sharded), checkpoint_id=str(tmp_path))
        return _tensors(sharded)

    def load() -> dict[str, torch.Tensor]:
        sharded = _sharded(ADAM, tables)
        state = nested(sharded)
        dcp.load(state, checkpoint_id=str(tmp_path))
        sharded.load_state_dict(state["run"]["state"]["model"])
        sharded.fused_optimizer.load_state_dict(state["run"]["state"]["optimizer"])
        return _tensors(sharded)

    saved, loaded = run_on_ranks(2, save), run_on_ranks(2, load)
    assert [len(tensors) for tensors in saved] == [3, 0]
    for name, tensor in saved[0].items():
        assert torch.equal(loaded[0][name], tensor)


def test_a_checkpoint_of_weights_alone_says_how_to_load_it(tmp_path):
    def save() -> None:
        dcp.save({"model": _sharded(FTRL).state_dict()}, checkpoint_id=str(tmp_path))

    run_on_ranks(2, save)
    for message in run_on_ranks(2, _refusal, FTRL, str(tmp_path)):
        assert re.search("table 't0': the checkpoint has no states of it.*weights alone", message)
