"""``use_index_dedup=True`` on CPU: our kernel of FBGEMM's op, and training with it."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import embedding

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingCollectionSharder, index_dedup

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks
from .updates import update_of

OP = "fbgemm::jagged_unique_indices"
COLUMNS: dict[str, tuple[Any, OptimType]] = {
    "stock": (EmbOptimType.EXACT_ADAGRAD, OptimType.EXACT_ADAGRAD),
    "FTRL": (OptimType.FTRL, OptimType.FTRL),
    "ADAM": (OptimType.ADAM, OptimType.ADAM),
}


def _arguments(
    rows: list[int], features: list[int], bags: list[list[list[int]]], grouped_last: bool = False
) -> tuple[torch.Tensor, ...]:
    """The op's arguments, in either of the layouts in which TorchRec names a table's features."""
    cumsum, offsets = [0], [0]
    for size, count in zip(rows, features, strict=True):
        first = [cumsum[-1]] * (count - 1), [offsets[-1] + count] * count
        cumsum += first[0] + [cumsum[-1] + size]
        offsets += first[1]
    if grouped_last:  # managed collision's layout
        ends = [sum(features[:table]) for table in range(len(features))]
        offsets = [end for end, count in zip(ends, features, strict=True) for _ in range(count)]
        offsets.append(sum(features))
    lengths = [len(bag) for feature in bags for bag in feature]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    indices = torch.tensor([i for feature in bags for bag in feature for i in bag]).long()
    return torch.tensor(cumsum), torch.tensor(offsets), starts, indices


@st.composite
def batches(draw: Any) -> tuple[list[int], list[int], list[list[list[int]]]]:
    rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    features = [draw(st.integers(1, 3)) for _ in rows]
    size = draw(st.integers(0, 4))
    bags = [
        [draw(st.lists(st.integers(0, n - 1), max_size=4)) for _ in range(size)]
        for n, count in zip(rows, features, strict=True)
        for _ in range(count)
    ]
    return rows, features, bags


@hypothesis.given(batches(), st.booleans())
def test_every_row_of_a_table_once(batch, grouped_last):
    rows, features, bags = batch
    arguments = _arguments(rows, features, bags, grouped_last)
    lengths, offsets, unique, reverse = index_dedup.unique_indices(*arguments)
    assert torch.equal(unique[reverse], arguments[3])
    assert torch.equal(offsets, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]))
    size = len(bags[0])
    first = 0
    for count in features:
        of_table = {i for feature in bags[first : first + count] for bag in feature for i in bag}
        begin, end = offsets[first * size], offsets[(first + count) * size]
        assert unique[begin:end].tolist() == sorted(of_table)
        spread = lengths[first * size : (first + count) * size].tolist()
        assert spread == sorted(spread, reverse=True)
        assert not spread or spread[0] - spread[-1] <= 1
        first += count


def test_a_worked_example():
    """Two features of a table of 10 rows, then a table of 5; two bags for each feature."""
    arguments = _arguments([10, 5], [2, 1], [[[3, 7], [3]], [[9], [7]], [[4, 4], [0]]])
    torchrec_ext.install()
    found = torch.ops.fbgemm.jagged_unique_indices(*arguments)
    assert [each.tolist() for each in found] == [
        [1, 1, 1, 0, 1, 1],
        [0, 1, 2, 3, 3, 4, 5],
        [3, 7, 9, 0, 4],
        [0, 1, 0, 2, 1, 4, 4, 3],
    ]


@pytest.mark.parametrize("wrong", [10, -1])
def test_an_index_of_no_row_is_refused(wrong):
    """Row 10 of the first table would be taken for row 0 of the second."""
    message = f"lookup 1 is of row {wrong} in a table of 10 rows"
    with pytest.raises(ValueError, match=message):
        index_dedup.unique_indices(*_arguments([10, 5], [1, 1], [[[3, wrong]], [[0]]]))


def test_uneven_batch_sizes_are_refused():
    cumsum, offsets, starts, indices = _arguments([10, 5], [1, 1], [[[3]], [[0]]])
    with pytest.raises(ValueError, match="3 bags for 2 features"):
        index_dedup.unique_indices(cumsum, offsets, torch.tensor([0, 1, 1, 2]), indices)


def test_a_kernel_that_is_there_already_stays():
    def register() -> list[int]:
        index_dedup._library = None
        theirs = torch.library.Library("fbgemm", "IMPL")
        theirs.impl("jagged_unique_indices", lambda a, b, c, d: (a, b, c, d), "CPU")
        index_dedup.register()
        one = torch.ones(1).long()
        return [each.item() for each in torch.ops.fbgemm.jagged_unique_indices(one, one, one, one)]

    assert run_on_ranks(1, register) == [[1, 1, 1, 1]]


def _train(
    column: str, sharding_type: str, dedup: bool, registered: bool = True
) -> tuple[dict[str, list[Any]], list[torch.Tensor]]:
    """This rank's shards after training, and its embeddings of the first batch."""
    optimizer = COLUMNS[column][0]
    if registered:
        torchrec_ext.install()
    else:
        index_dedup._library = None  # takes the kernel away from this fork of the test
    fused_params = {"optimizer": optimizer, **HYPERPARAMETERS[COLUMNS[column][1]]}
    sharder_type = (
        embedding.EmbeddingCollectionSharder if column == "stock" else EmbeddingCollectionSharder
    )
    sharder = sharder_type(fused_params, use_index_dedup=dedup)
    tables = models.SEQUENCE_TABLES[:2]
    model = models.Model(tables, pooled=False)
    plan = models.plan_for(model, [sharder], sharding_type, tables)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(tables))
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    steps = models.batches(5, tables)
    with torch.no_grad():
        first = sharded.module.ec(steps[0].of_rank(rank, ranks))
        embeddings = [jagged.values() for jagged in first.values()]
    for step in steps:
        sharded(step.of_rank(rank, ranks)).backward()
    return models.read_weights(sharded), embeddings


@pytest.mark.parametrize("sharding_type", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("column", COLUMNS)
def test_training_with_and_without_is_the_same(column, sharding_type):
    tables = models.SEQUENCE_TABLES[:2]
    optimizer = COLUMNS[column][1]
    update = update_of(optimizer, **HYPERPARAMETERS[optimizer])
    updates = dict.fromkeys((table.name for table in tables), update)
    expected = models.train_unsharded(models.batches(5, tables), tables, updates, pooled=False)
    without, with_dedup = (
        run_on_ranks(2, _train, column, sharding_type, dedup) for dedup in (False, True)
    )
    for (_, expected_embeddings), (_, embeddings) in zip(without, with_dedup, strict=True):
        assert all(map(torch.equal, expected_embeddings, embeddings))
    for answers in (without, with_dedup):
        found = models.assemble([weights for weights, _ in answers])
        for name, weight in expected.items():
            torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)


def test_without_our_kernel_there_is_none():
    with pytest.raises(NotImplementedError, match=f"Could not run '{OP}' .* 'CPU' backend"):
        run_on_ranks(2, _train, "stock", "table_wise", True, False)
