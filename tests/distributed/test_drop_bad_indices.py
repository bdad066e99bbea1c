"""``drop_bad_indices`` under sharding: training as if the bad lookups were not in the batches."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor, PoolingType

from torchrec_ext import OptimType
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    PlanError,
)
from torchrec_ext.optim import FTRL
from torchrec_ext.optimizers import HyperparameterError

from . import models
from .ranks import run_on_ranks

SETTINGS = {
    "optimizer": OptimType.FTRL,
    "learning_rate": 0.2,
    "ftrl_beta": 0.5,
    "l1_reg": 0.01,
    "drop_bad_indices": True,
}
MODES = ("FATAL", "WARNING", "IGNORE", "NONE")
MEAN_TABLES = tuple(
    dataclasses.replace(table, pooling=PoolingType.MEAN) for table in models.BAG_TABLES
)


def _with_bad_lookups(step: models.Lookups, tables, everything: bool) -> models.Lookups:
    """Puts bad lookups between the others; ``everything``: and empties no bag of them."""
    chance = random.Random(5)
    rows = {feature: table.rows for table in tables for feature in table.features}
    bad_rows: dict[str, list[list[int]]] = {}
    bad_weights: dict[str, list[list[float]]] = {}
    for feature, bags in step.rows.items():
        limit = rows[feature]
        bad_rows[feature], bad_weights[feature] = [], []
        for bag, weights in zip(bags, step.weights[feature], strict=True):
            pairs = list(zip(bag, weights, strict=True))
            for _ in range(chance.randrange(4) + everything):
                # Row-wise sharding sends these to other shards than one another.
                bad = chance.choice([limit, limit + 1, 2 * limit + 3, 10**9, -1, -2, -limit])
                pairs.insert(chance.randrange(len(pairs) + 1), (bad, 7.0))
            bad_rows[feature].append([row for row, _ in pairs])
            bad_weights[feature].append([weight for _, weight in pairs])
    return models.Lookups(bad_rows, bad_weights)


def _without_any(step: models.Lookups) -> models.Lookups:
    empty = {feature: [[] for _ in bags] for feature, bags in step.rows.items()}
    return models.Lookups(empty, empty)


def _train(sharding_type, tables, pooled, weighted, mode, bad) -> tuple[dict, dict]:
    sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder = sharder_type({**SETTINGS, "bounds_check_mode": BoundsCheckMode[mode]})
    model = models.Model(tables, pooled, weighted)
    plan = models.plan_for(model, [sharder], sharding_type, tables)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(tables))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    steps = models.batches(3, tables)
    steps.append(_without_any(steps[0]))  # nothing but bad lookups
    for step in steps:
        batch = _with_bad_lookups(step, tables, everything=True) if bad else step
        sharded(batch.of_rank(rank, ranks, weighted)).backward()
    return models.read_weights(sharded), models.read_states(sharded)


def _whole(answers) -> list[dict]:
    return [models.assemble([answer[part] for answer in answers]) for part in (0, 1)]


@functools.cache
def _without_them(*arguments) -> list[dict]:
    return _whole(run_on_ranks(2, _train, *arguments, "FATAL", False))


CASES = [
    pytest.param(sharding_type, kind, mode, id=f"{sharding_type}-{kind}-{mode}")
    for number, (sharding_type, kind) in enumerate(
        [
            (sharding_type, kind)
            for sharding_type in ("table_wise", "row_wise", "column_wise")
            for kind in ("sum", "mean", "weighted", "sequence")
        ]
        + [("table_row_wise", "mean"), ("grid_shard", "sum")]
    )
    for mode in (MODES if number == 0 else (MODES[number % 4],))
]


@pytest.mark.parametrize(("sharding_type", "kind", "mode"), CASES)
def test_equals_training_without_them_on_two_ranks(sharding_type, kind, mode):
    tables = {"mean": MEAN_TABLES, "sequence": models.SEQUENCE_TABLES}.get(kind, models.SUM_TABLES)
    arguments = (sharding_type, tables, kind != "sequence", kind == "weighted")
    found = _whole(run_on_ranks(2, _train, *arguments, mode, True))
    expected = _without_them(*arguments)
    start = models.initial_weights(tables)
    assert all(not torch.equal(expected[0][name], start[name]) for name in start)
    for full, reference in zip(found, expected, strict=True):
        assert full.keys() == reference.keys()
        for name, value in reference.items():
            assert torch.equal(full[name], value), name


SIZES = (5, 0, 3, 1)  # examples of each feature on a rank, for a batch of 8


def _variable(step: models.Lookups, more: int) -> KeyedJaggedTensor:
    """A rank's batch in which examples share what they look up."""
    sizes = [size + more for size in SIZES]
    rows = [bag for bags, n in zip(step.rows.values(), sizes, strict=True) for bag in bags[:n]]
    inverse = [[example % n for example in range(8)] if n else [0] * 8 for n in sizes]
    return KeyedJaggedTensor(
        keys=list(step.rows),
        values=torch.tensor([row for bag in rows for row in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in rows], dtype=torch.int64),
        stride_per_key_per_rank=[[n] for n in sizes],
        inverse_indices=(list(step.rows), torch.tensor(inverse)),
    )


def _train_variable(sharding_type: str, bad: bool) -> tuple[dict, dict]:
    sharder = EmbeddingBagCollectionSharder(SETTINGS)
    model = models.Model(MEAN_TABLES)
    plan = models.plan_for(model, [sharder], sharding_type, MEAN_TABLES)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(MEAN_TABLES))
    # gloo's reduce-scatter, which row-wise sharding ends with, wants the same sizes on every rank.
    more = 1 if sharding_type == "row_wise" else 1 + dist.get_rank()
    for step in models.batches(3, MEAN_TABLES):
        batch = _with_bad_lookups(step, MEAN_TABLES, everything=True) if bad else step
        sharded(_variable(batch, more)).backward()
    return models.read_weights(sharded), models.read_states(sharded)


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise"])
def test_variable_batch_sizes_on_two_ranks(sharding_type):
    found = _whole(run_on_ranks(2, _train_variable, sharding_type, True))
    expected = _whole(run_on_ranks(2, _train_variable, sharding_type, False))
    for full, reference in zip(found, expected, strict=True):
        for name, value in reference.items():
            assert torch.equal(full[name], value), name
    start = models.initial_weights(MEAN_TABLES)
    assert all(not torch.equal(found[0][name], start[name]) for name in start)


def _shared_feature(second: models.Table, sharding_type: str) -> None:
    tables = (models.Table("t0", 23, 8, ("f",), PoolingType.MEAN), second)
    sharder = EmbeddingBagCollectionSharder(SETTINGS)
    model = models.Model(tables)
    models.shard(model, [sharder], models.plan_for(model, [sharder], sharding_type, tables))


def test_a_feature_of_two_tables_that_drop_different_lookups_is_refused_on_every_rank():
    other = models.Table("t1", 11, 8, ("f",), PoolingType.MEAN)

    def build() -> str:
        try:
            _shared_feature(other, "row_wise")
        except PlanError as error:
            return str(error)
        return "built"

    for message in run_on_ranks(2, build):
        assert "table 't0': feature 'f' is also read by a table of 11 rows" in message
        assert "has 23 rows" in message and "Shard the other one table_wise" in message
    run_on_ranks(2, _shared_feature, other, "column_wise")
    run_on_ranks(2, _shared_feature, dataclasses.replace(other, rows=23), "row_wise")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"drop_bad_indices": "yes"}, r"'t0', 't1', 't2'\]: drop_bad_indices='yes' is not legal"),
        ({"rounding_seed": 0.5}, "rounding_seed=0.5 is not legal"),
        ({"gradient_clipping": True, "max_gradient": -1.0}, "max_gradient=-1.0 is not legal"),
        ({"optimizer": EmbOptimType.EXACT_SGD}, "drop_bad_indices=True is a keyword of torchrec_"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_keywords_are_refused_on_every_rank(extra, message):
    """Also on one that gets no table and so builds no module."""

    def build() -> str:
        sharder = EmbeddingBagCollectionSharder({**SETTINGS, **extra})
        if not isinstance(sharder.fused_params["optimizer"], OptimType):
            for name in ("learning_rate", "ftrl_beta", "l1_reg"):
                del sharder.fused_params[name]
        model = models.Model(models.BAG_TABLES)
        plan = models.plan_for(model, [sharder], "table_wise")
        with pytest.raises(HyperparameterError, match=message):
            models.shard(model, [sharder], plan)
        return "refused"

    assert run_on_ranks(4, build) == ["refused"] * 4


def test_a_class_per_table_takes_it_from_the_sharder():
    def build() -> dict:
        model = models.Model()
        for table in model.ebc.embedding_bags.values():
            _apply_optimizer_in_backward(FTRL, table.parameters(), {"lr": 0.1})
        sharder = EmbeddingBagCollectionSharder({"drop_bad_indices": True})
        sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
        return {name: m.drop_bad_indices for name, m in models.modules_by_table(sharded).items()}

    assert run_on_ranks(1, build) == [{"t0": True, "t1": True, "t2": True}]
