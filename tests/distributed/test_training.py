"""Sharded training computes what unsharded float64 training computes.

TorchRec divides the gradients of sharded tables by the number of ranks. Every rank here feeds its
share of one global batch and takes the mean over that share, so the division makes the gradient
that of the global mean: the number of ranks changes nothing, and FTRL's ``l1_reg`` is weighed
against the same gradient. A loss that is a *sum* over a rank's share would come out divided by the
number of ranks instead, which is as if ``l1_reg`` were that many times larger.
"""

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

from . import models
from .ranks import run_on_ranks
from .updates import by_column_shard, update_of

OPTIMIZERS = {
    OptimType.FTRL: {"learning_rate": 0.2, "ftrl_beta": 0.5, "l1_reg": 0.2, "l2_reg": 0.01},
    OptimType.EXACT_SGD: {"learning_rate": 0.2},
    OptimType.EXACT_ADAGRAD: {"learning_rate": 0.2, "eps": 1e-6},
    OptimType.EXACT_ROWWISE_ADAGRAD: {"learning_rate": 0.2, "eps": 1e-6},
    OptimType.ADAM: {"learning_rate": 0.1, "eps": 1e-3, "weight_decay": 0.1},
    OptimType.PARTIAL_ROWWISE_ADAM: {"learning_rate": 0.1, "eps": 1e-3, "weight_decay": 0.1},
    OptimType.LAMB: {"learning_rate": 0.1, "eps": 1e-3, "weight_decay": 0.1},
}
# Their updates look at a whole row, so that a shard of its columns is another optimizer.
ROW_OPTIMIZERS = (
    OptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.PARTIAL_ROWWISE_ADAM,
    OptimType.LAMB,
)
SHARDS_OF_FIRST_TABLE = {
    "table_wise": 1,
    "column_wise": 2,
    "row_wise": 2,
    "table_row_wise": 2,
    "grid_shard": 4,
}


def _tables(optimizer: OptimType, sharding_type: str, pooled: bool, weighted: bool) -> tuple:
    if not pooled:
        return models.SEQUENCE_TABLES
    if sharding_type == "grid_shard" and optimizer in ROW_OPTIMIZERS:
        return models.SUM_TABLES[:2]
    return models.SUM_TABLES if weighted or sharding_type == "grid_shard" else models.BAG_TABLES


def _train(
    optimizer: OptimType, sharding_type: str, pooled: bool, weighted: bool, steps: int
) -> tuple[dict, dict, int]:
    """This rank's shards of weights and states, and how many shards the first table has."""
    tables = _tables(optimizer, sharding_type, pooled, weighted)
    sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder = sharder_type({"optimizer": optimizer, **OPTIMIZERS[optimizer]})
    model = models.Model(tables, pooled, weighted)
    plan = models.plan_for(model, [sharder], sharding_type, tables)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(tables))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in models.batches(steps, tables):
        sharded(step.of_rank(rank, ranks, weighted)).backward()
    shards = next(iter(plan.plan.values()))["t0"].sharding_spec.shards
    return models.read_weights(sharded), models.read_states(sharded), len(shards)


def _sharded(ranks: int, *arguments) -> tuple[dict, list[dict], int]:
    answers = run_on_ranks(ranks, _train, *arguments)
    weights = models.assemble([weights for weights, _, _ in answers])
    return weights, [states for _, states, _ in answers], answers[0][2]


def _reference(
    optimizer: OptimType, sharding_type: str, pooled: bool, weighted: bool, steps: int
) -> dict:
    tables = _tables(optimizer, sharding_type, pooled, weighted)
    update = update_of(optimizer, **OPTIMIZERS[optimizer])
    if sharding_type in ("column_wise", "grid_shard"):
        update = by_column_shard(update, models.COLUMNS_PER_SHARD)
    updates = dict.fromkeys((table.name for table in tables), update)
    return models.train_unsharded(models.batches(steps, tables), tables, updates, pooled, weighted)


def _assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        error = (found[name].double() - table.double()).abs() / table.double().abs().clamp(min=1)
        assert error.max() <= tolerance, f"{name}: {error.max()} at {error.argmax()}"


@pytest.mark.parametrize("sharding_type", SHARDS_OF_FIRST_TABLE)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS), ids=lambda o: o.name)
def test_bags_on_two_ranks_equal_the_unsharded_reference(optimizer, sharding_type):
    weights, _, shards = _sharded(2, optimizer, sharding_type, True, False, 10)
    assert shards == SHARDS_OF_FIRST_TABLE[sharding_type]
    _assert_close(weights, _reference(optimizer, sharding_type, True, False, 10), 1e-5)


@pytest.mark.parametrize("sharding_type", ("table_wise", "column_wise", "row_wise"))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS), ids=lambda o: o.name)
def test_sequences_on_two_ranks_equal_the_unsharded_reference(optimizer, sharding_type):
    weights, _, shards = _sharded(2, optimizer, sharding_type, False, False, 10)
    assert shards == SHARDS_OF_FIRST_TABLE[sharding_type]
    _assert_close(weights, _reference(optimizer, sharding_type, False, False, 10), 1e-5)


@pytest.mark.parametrize("sharding_type", SHARDS_OF_FIRST_TABLE)
def test_weighted_bags_equal_the_unsharded_reference(sharding_type):
    weights, _, _ = _sharded(2, OptimType.FTRL, sharding_type, True, True, 10)
    reference = _reference(OptimType.FTRL, sharding_type, True, True, 10)
    _assert_close(weights, reference, 1e-5)


@pytest.mark.parametrize(
    ("optimizer", "sharding_type"),
    [
        (optimizer, sharding_type)
        for optimizer in OPTIMIZERS
        for sharding_type in ("table_wise", "column_wise", "row_wise")
        if optimizer not in ROW_OPTIMIZERS or sharding_type != "column_wise"
    ],
    ids=str,
)
def test_one_rank_and_two_ranks_agree_after_fifty_steps(optimizer, sharding_type):
    one, _, _ = _sharded(1, optimizer, sharding_type, True, False, 50)
    two, _, _ = _sharded(2, optimizer, sharding_type, True, False, 50)
    assert any(
        not torch.equal(one[name], start) for name, start in models.initial_weights().items()
    )
    _assert_close(two, one, 1e-5)


@pytest.mark.parametrize("sharding_type", ("table_wise", "row_wise"))
def test_ftrl_zeroes_the_same_weights_on_one_and_two_ranks(sharding_type):
    one, _, _ = _sharded(1, OptimType.FTRL, sharding_type, True, False, 50)
    two, _, _ = _sharded(2, OptimType.FTRL, sharding_type, True, False, 50)
    zeros = sum((weight == 0).sum().item() for weight in one.values())
    assert zeros > 0, "the test needs an l1_reg that bites"
    assert all(torch.equal(one[name] == 0, two[name] == 0) for name in one)


def test_a_sum_loss_is_divided_by_the_number_of_ranks():
    """What TorchRec's gradient division does to a loss that is not a mean over examples."""

    def train() -> tuple[dict, dict, int]:
        sharder = EmbeddingBagCollectionSharder(
            {"optimizer": OptimType.FTRL, **OPTIMIZERS[OptimType.FTRL]}
        )
        model = models.Model()
        sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "row_wise"))
        models.write_weights(sharded, models.initial_weights())
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for step in models.batches(10):
            features = step.of_rank(rank, ranks)
            (sharded(features) * features.stride()).backward()
        return models.read_weights(sharded)

    weights = models.assemble(run_on_ranks(2, train))
    update = update_of(OptimType.FTRL, **OPTIMIZERS[OptimType.FTRL])
    updates = dict.fromkeys((table.name for table in models.BAG_TABLES), update)
    reference = models.train_unsharded(
        models.batches(10),
        models.BAG_TABLES,
        updates,
        gradient_scale=models.BATCH_SIZE / 2,
    )
    _assert_close(weights, reference, 1e-5)
