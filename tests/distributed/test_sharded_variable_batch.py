"""Features of different batch sizes (VBE) through a sharded collection, in every sharding type."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor

from torchrec_ext import OptimType

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks
from .test_sharding_types import ONE_ROW, RANKS_OF_A_HOST, SHARDING_TYPES, TWO_LEVEL, AllTypes
from .test_sharding_types import EmbeddingBagCollectionSharder as OurSharder
from .updates import update_of

COLUMNS: dict[str, tuple[Any, OptimType]] = {
    "stock": (EmbOptimType.EXACT_SGD, OptimType.EXACT_SGD),
    "stock Adagrad": (EmbOptimType.EXACT_ADAGRAD, OptimType.EXACT_ADAGRAD),
    "FTRL": (OptimType.FTRL, OptimType.FTRL),
    "ADAM": (OptimType.ADAM, OptimType.ADAM),
}
TABLES = models.SUM_TABLES[:2]
RANKS = 2
SHARE = models.BATCH_SIZE // RANKS
STEPS = 4


class Batch:
    """What a rank feeds in one step: some bags for each feature, and which one an example has.

    Every bag is some example's. With ``alike``, ranks have the same numbers of bags.
    """

    def __init__(
        self, tables: tuple[models.Table, ...], rank: int, step: int, alike: bool = False
    ) -> None:
        counts = torch.Generator().manual_seed(100 * step + (0 if alike else rank))
        generator = torch.Generator().manual_seed(100 * step + rank)

        def integers(high: int, count: int) -> list[int]:
            return torch.randint(high, (count,), generator=generator).tolist()

        self.bags: dict[str, list[list[int]]] = {}
        self.bag_of: dict[str, list[int]] = {}
        for table in tables:
            for feature in table.features:
                count = int(torch.randint(1, SHARE + 1, (1,), generator=counts))
                self.bags[feature] = [integers(table.rows, n) for n in integers(4, count)]
                self.bag_of[feature] = [*range(count), *integers(count, SHARE - count)]

    def features(self) -> KeyedJaggedTensor:
        bags = [bag for feature in self.bags.values() for bag in feature]
        return KeyedJaggedTensor(
            keys=list(self.bags),
            values=torch.tensor([row for bag in bags for row in bag], dtype=torch.int64),
            lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            stride_per_key_per_rank=[[len(feature)] for feature in self.bags.values()],
            inverse_indices=(list(self.bags), torch.tensor(list(self.bag_of.values()))),
        )

    def examples(self, feature: str) -> list[list[int]]:
        """Every example's bag."""
        return [self.bags[feature][bag] for bag in self.bag_of[feature]]


def _train(column: str, sharding_type: str, tables: tuple[models.Table, ...], alike: bool) -> dict:
    given, optimizer = COLUMNS[column]
    fused_params = {"optimizer": given, **HYPERPARAMETERS[optimizer]}
    sharders = [(AllTypes if column.startswith("stock") else OurSharder)(fused_params)]
    model = models.Model(tables)
    local = RANKS_OF_A_HOST if sharding_type in TWO_LEVEL else None
    plan = models.plan_for(model, sharders, sharding_type, tables, local)
    for sharding in plan.plan["ebc"].values():
        sharding.compute_kernel = "fused"
    sharded = models.shard(model, sharders, plan)
    models.write_weights(sharded, models.initial_weights(tables))
    for step in range(STEPS):
        batch = Batch(tables, torch.distributed.get_rank(), step, alike)
        embeddings = sharded.module.ebc(batch.features()).to_dict()
        loss = sum(models.loss_of(embedding) for embedding in embeddings.values()) / SHARE
        loss.backward()
    return models.read_weights(sharded)


def _expected(
    column: str, tables: tuple[models.Table, ...], alike: bool
) -> dict[str, torch.Tensor]:
    steps = []
    for step in range(STEPS):
        batches = [Batch(tables, rank, step, alike) for rank in range(RANKS)]
        rows = {f: [bag for each in batches for bag in each.examples(f)] for f in batches[0].bags}
        weights = {f: [[1.0] * len(bag) for bag in bags] for f, bags in rows.items()}
        steps.append(models.Lookups(rows, weights))
    optimizer = COLUMNS[column][1]
    update = update_of(optimizer, **HYPERPARAMETERS[optimizer])
    return models.train_unsharded(
        steps, tables, dict.fromkeys((table.name for table in tables), update)
    )


# gloo gathers only tensors of one size, and by rows every rank sends all of a rank's bags.
BY_ROWS = ("row_wise", "table_row_wise")


@pytest.mark.parametrize("sharding_type", [t for t in SHARDING_TYPES if t != "grid_shard"])
@pytest.mark.parametrize("column", ["stock", "FTRL", "ADAM"])
def test_variable_batches_train_as_the_reference(column, sharding_type):
    _assert_trains(column, sharding_type, sharding_type in BY_ROWS)


def _assert_trains(column: str, sharding_type: str, alike: bool) -> None:
    tables = TABLES if column == "stock" else (*TABLES, ONE_ROW)
    found = models.assemble(run_on_ranks(RANKS, _train, column, sharding_type, tables, alike))
    expected = _expected(column, tables, alike)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sharding_type", BY_ROWS)
@pytest.mark.parametrize("column", ["stock", "FTRL", "ADAM"])
def test_gloo_cannot_gather_bags_of_unlike_ranks(column, sharding_type):
    message = "ProcessGroupGloo::allgather: invalid tensor size at index"
    with pytest.raises(RuntimeError, match=message):
        run_on_ranks(RANKS, _train, column, sharding_type, TABLES, False)


@pytest.mark.parametrize("column", ["stock", "FTRL", "ADAM"])
def test_torchrec_has_variable_batches_under_grid_shard_since_1_9(column):
    if tuple(map(int, version("torchrec").split(".")[:2])) >= (1, 9):
        _assert_trains(column, "grid_shard", True)
        return
    with pytest.raises(IndexError, match="Dimension out of range"):
        run_on_ranks(RANKS, _train, column, "grid_shard", TABLES, True)


def test_fbgemms_adagrad_has_no_variable_batches():
    with pytest.raises(AssertionError, match="Variable batch size TBE support is enabled for"):
        run_on_ranks(RANKS, _train, "stock Adagrad", "table_wise", TABLES, True)
