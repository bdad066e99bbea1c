"""Checkpoints go from any plan to any other: weights, all states and the step clock."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as TorchRecsSharder

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder
from torchrec_ext.optimizers import spec_of

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks
from .updates import update_of

# Many rows, fewer rows than some plans have shards, and a single one.
TABLES = (
    models.Table("t0", 37, 8, ("f0", "f3")),
    models.Table("t1", 6, 16, ("f1",)),
    models.Table("t2", 1, 8, ("f2",)),
)
PER_ROW = {"bias_correction": "per_row"}
OPTIMIZERS: dict[str, tuple[OptimType, dict[str, Any]]] = {
    "FTRL": (OptimType.FTRL, {}),
    "ADAM": (OptimType.ADAM, {}),
    "EXACT_ROWWISE_ADAGRAD": (OptimType.EXACT_ROWWISE_ADAGRAD, {}),
    "ADAM-per_row": (OptimType.ADAM, PER_ROW),
    "PARTIAL_ROWWISE_ADAM": (OptimType.PARTIAL_ROWWISE_ADAM, {}),
}
SAVED = ("row_wise", "table_wise", "column_wise")
LOADED = (*SAVED, "table_row_wise", "grid_shard")
RANKS = ((2, 1), (1, 2), (2, 4))
STEPS = 3
# Of the 4 ranks two are on each host, so that grid_shard has several shards of columns.
LOCAL_WORLD_SIZE = 2


def sharded_model(optimizer: str, sharding_type: str) -> models.DistributedModelParallel:
    optim_type, more = OPTIMIZERS[optimizer]
    fused_params = {"optimizer": optim_type, **HYPERPARAMETERS[optim_type], **more}
    model, sharder = models.Model(TABLES), EmbeddingBagCollectionSharder(fused_params)
    local = min(dist.get_world_size(), LOCAL_WORLD_SIZE)
    plan = models.plan_for(model, [sharder], sharding_type, TABLES, local)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(TABLES))
    return sharded


def train(sharded: models.DistributedModelParallel, first: int, last: int) -> None:
    for batch in models.batches(last, TABLES)[first:]:
        sharded(batch.of_rank(dist.get_rank(), dist.get_world_size())).backward()


def state_of(sharded: models.DistributedModelParallel) -> dict[str, Any]:
    return {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}


def load(sharded: models.DistributedModelParallel, folder: str) -> None:
    state = state_of(sharded)
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state["model"])
    sharded.fused_optimizer.load_state_dict(state["optimizer"])


def seen(sharded: models.DistributedModelParallel) -> dict[str, Any]:
    """This rank's weights, states by column and clocks, then the weights after one step more."""
    states = {
        key: [_by_column(part) for part in value.local_shards()]
        for of_table in sharded.fused_optimizer.state_dict()["state"].values()
        for key, value in of_table.items()
        if isinstance(value, ShardedTensor)
    }
    before, steps = models.read_weights(sharded), models.read_steps(sharded)
    train(sharded, STEPS, STEPS + 1)
    after = models.read_weights(sharded)
    return {"weights": before, "states": states, "steps": steps, "after": after}


def _by_column(part: Any) -> tuple[tuple[int, ...], torch.Tensor]:
    return tuple(part.metadata.shard_offsets), part.tensor.detach().clone()


def _run_local(ranks: int) -> dict[str, int]:
    return {"local_world_size": min(ranks, LOCAL_WORLD_SIZE)}


@functools.cache
def saved(optimizer: str, sharding_type: str, ranks: int) -> tuple[str, list[Any]]:
    """A checkpoint's folder, and what its run went on to."""
    folder = tempfile.mkdtemp(prefix="plans")

    def run() -> dict[str, Any]:
        sharded = sharded_model(optimizer, sharding_type)
        train(sharded, 0, STEPS)
        dcp.save(state_of(sharded), checkpoint_id=folder)
        return seen(sharded)

    return folder, run_on_ranks(ranks, run, **_run_local(ranks))


@functools.cache
def loaded(optimizer: str, saved_as: str, ranks: tuple[int, int]) -> list[dict[str, Any]]:
    """By rank, what every sharding type made of a checkpoint."""
    folder, _ = saved(optimizer, saved_as, ranks[0])

    def run() -> dict[str, Any]:
        results = {}
        for sharding_type in LOADED:
            sharded = sharded_model(optimizer, sharding_type)
            load(sharded, folder)
            results[sharding_type] = seen(sharded)
        return results

    return run_on_ranks(ranks[1], run, **_run_local(ranks[1]))


def _by_key(results: list[Any], kind: str) -> dict[str, torch.Tensor]:
    return models.assemble([each[kind] for each in results])


def _columns(value: torch.Tensor, table: models.Table) -> torch.Tensor:
    """A ``[rows]`` state, in either form, for every column."""
    flat = value.reshape(table.rows, -1)
    return flat.repeat_interleave(table.dim // flat.shape[1], dim=1)


def _blocks(weights: list[Any], table: str) -> list[tuple[slice, slice]]:
    return [
        tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
        for rank in weights
        for offsets, part in rank["weights"].get(table, [])
        if part.shape[0]
    ]


def _assert_states(optimizer: str, before: list[Any], after: list[Any]) -> None:
    optim_type, more = OPTIMIZERS[optimizer]
    states = spec_of(optim_type).states_for(spec_of(optim_type).resolve(more))
    one, other = _by_key(before, "states"), _by_key(after, "states")
    assert one.keys() == other.keys()
    for table in TABLES:
        for place, state in enumerate(states):
            key = f"{table.name}.{state.name if place else 'momentum1'}"
            if not state.rowwise:
                assert torch.equal(one[key], other[key]), key
                continue
            written, read = _columns(one[key], table), _columns(other[key], table)
            for block in _blocks(after, table.name):
                mean = written[block].double().mean(1, keepdim=True)
                assert torch.equal(read[block], mean.float().expand(read[block].shape)), key


def _next_rowwise_adagrad(before: list[Any], after: list[Any]) -> dict[str, torch.Tensor]:
    """One step in float64 from the loaded states, every shard by itself."""
    weights = {name: w.double() for name, w in _by_key(after, "weights").items()}
    states = _by_key(after, "states")
    batch = models.batches(STEPS + 1, TABLES)[STEPS]
    gradients = models.gradients_of(batch, weights, TABLES)
    update = update_of(
        OptimType.EXACT_ROWWISE_ADAGRAD, **HYPERPARAMETERS[OptimType.EXACT_ROWWISE_ADAGRAD]
    )
    for table in TABLES:
        columns = _columns(states[f"{table.name}.momentum1"], table).double()
        for block in _blocks(after, table.name):
            # Rows without a gradient keep weight and state: the update of a zero gradient is none.
            update(
                weights[table.name][block],
                gradients[table.name][block],
                {"sum": columns[block][:, 0].clone()},
                STEPS + 1,
            )
    return weights


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: f"{ranks[0]}to{ranks[1]}")
@pytest.mark.parametrize("loaded_as", LOADED)
@pytest.mark.parametrize("saved_as", SAVED)
@pytest.mark.parametrize("optimizer", ["FTRL", "ADAM", "EXACT_ROWWISE_ADAGRAD"])
def test_every_plan_reads_every_other(optimizer, saved_as, loaded_as, ranks) -> None:
    _, before = saved(optimizer, saved_as, ranks[0])
    after = [rank[loaded_as] for rank in loaded(optimizer, saved_as, ranks)]
    weights = _by_key(before, "weights")
    for name, weight in _by_key(after, "weights").items():
        assert torch.equal(weight, weights[name])
    _assert_states(optimizer, before, after)
    clocks = {key: step for rank in after for key, step in rank["steps"].items()}
    has_clock = optimizer == "ADAM"
    assert clocks == ({f"{table.name}.step": STEPS for table in TABLES} if has_clock else {})
    if optimizer == "EXACT_ROWWISE_ADAGRAD":
        expected = _next_rowwise_adagrad(before, after)
    else:  # the uninterrupted run
        expected = {name: weight.double() for name, weight in _by_key(before, "after").items()}
    for name, weight in _by_key(after, "after").items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sharding_type", LOADED)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_same_plan_goes_on_with_the_same_bits(optimizer, sharding_type) -> None:
    folder, before = saved(optimizer, sharding_type, 2)

    def run() -> dict[str, Any]:
        sharded = sharded_model(optimizer, sharding_type)
        load(sharded, folder)
        return seen(sharded)

    after = run_on_ranks(2, run, **_run_local(2))
    assert [rank["steps"] for rank in before] == [rank["steps"] for rank in after]
    for kind in ("weights", "states", "after"):
        for one, other in zip(before, after, strict=True):
            assert one[kind].keys() == other[kind].keys()
            for key, parts in one[kind].items():
                for (place, value), (new_place, new_value) in zip(
                    parts, other[kind][key], strict=True
                ):
                    assert place == new_place
                    assert torch.equal(value, new_value), (kind, key)


def _fbgemms(optimizer: EmbOptimType, sharding_type: str) -> models.DistributedModelParallel:
    model = models.Model(TABLES)
    sharder = TorchRecsSharder({"optimizer": optimizer, "learning_rate": 0.1})
    plan = models.plan_for(model, [sharder], sharding_type, TABLES)
    return models.shard(model, [sharder], plan)


@pytest.mark.parametrize(
    "optimizer, message",
    [(EmbOptimType.EXACT_ADAGRAD, ""), (EmbOptimType.EXACT_ROWWISE_ADAGRAD, "Size mismatch")],
    ids=str,
)
def test_torchrec_reads_states_of_other_plans_unless_they_are_row_wise(
    optimizer, message, tmp_path
) -> None:
    def save() -> None:
        sharded = _fbgemms(optimizer, "table_wise")
        train(sharded, 0, STEPS)
        dcp.save(state_of(sharded), checkpoint_id=str(tmp_path))

    def read() -> str:
        sharded = _fbgemms(optimizer, "column_wise")
        try:
            load(sharded, str(tmp_path))
        except CheckpointException as error:
            return str(error)
        return ""

    run_on_ranks(2, save)
    assert all(message in found and bool(message) == bool(found) for found in run_on_ranks(2, read))


def test_torchs_asynchronous_save_cannot_copy_sharded_tables(tmp_path) -> None:
    def save() -> None:
        sharded = _fbgemms(EmbOptimType.EXACT_ADAGRAD, "table_wise")
        dcp.async_save(state_of(sharded), checkpoint_id=str(tmp_path)).result()

    with pytest.raises(RuntimeError, match="ShardedTensor"):
        run_on_ranks(2, save)
