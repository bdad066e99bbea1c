"""What is zero in a table is counted alike in every module that can hold it."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.sparsity import TableSparsity, format_sparsity, measure, nonzero_rows

from .distributed.models import Model, Table, plan_for, shard, write_weights
from .distributed.ranks import run_on_ranks
from .modules import HALF, fill, make_module

# Rows 1 and 3 are zero, and row 2 has one weight: 0.0 of either sign is zero, NaN is not.
WEIGHT = torch.tensor([[1.0, 2, 3, 4], [0, 0, -0.0, 0], [0, 0, 5, 0], [0, 0, 0, 0]])
EXPECTED = {"rows": 4, "dim": 4, "nonzero_rows": 2, "nonzero_weights": 5}


def _figures(table: TableSparsity) -> dict[str, int]:
    return {name: getattr(table, name) for name in EXPECTED}


def test_a_tensor() -> None:
    (table,) = measure(WEIGHT)
    assert _figures(table) == EXPECTED
    assert (table.table, table.dtype) == ("table", torch.float32)
    assert table.zero_row_share == 0.5
    assert table.zero_weight_share == 11 / 16
    assert table.dense_bytes == 64
    assert table.sparse_bytes == 2 * (4 + 16)


def test_nan_is_not_zero() -> None:
    (table,) = measure(torch.tensor([[0.0], [torch.nan]]))
    assert (table.nonzero_rows, table.nonzero_weights) == (1, 1)


def test_a_table_larger_than_a_block() -> None:
    weight = torch.zeros(2**20 + 1, 2)  # two blocks, and a row
    rows = torch.tensor([0, 2**19 - 1, 2**19, 2**20])
    weight[rows, 1] = 1.0
    (table,) = measure(weight)
    assert (table.nonzero_rows, table.nonzero_weights) == (4, 4)
    assert nonzero_rows(weight).nonzero().flatten().tolist() == rows.tolist()


def test_a_table_without_rows() -> None:
    (table,) = measure(torch.empty(0, 4))
    assert (table.zero_row_share, table.zero_weight_share, table.sparse_bytes) == (0.0, 0.0, 0)
    assert nonzero_rows(torch.empty(0, 4)).tolist() == []


def test_bare_modules_of_any_width_and_precision() -> None:
    module = make_module(OptimType.FTRL, [(4, 4), (3, 6), (1, 1)])
    fill(module, [WEIGHT, torch.eye(3, 6), torch.zeros(1, 1)])
    first, second, third = measure(module)
    assert _figures(first) == EXPECTED
    assert (first.table, second.table, third.table) == ("0", "1", "2")
    assert (second.nonzero_rows, second.nonzero_weights) == (3, 3)
    assert (third.nonzero_rows, third.zero_row_share) == (0, 1.0)
    half = make_module(OptimType.FTRL, [(4, 4)], table_names=["clicks"], **HALF)
    fill(half, [WEIGHT])
    (table,) = measure(torch.nn.Sequential(half))
    assert (table.table, table.dtype) == ("clicks", SparseType.FP16.as_dtype())
    assert _figures(table) == EXPECTED
    assert table.dense_bytes == 32


def test_sleeping_rows_are_woken() -> None:
    keywords = {"learning_rate": 0.5, "weight_decay": 1.5, "sparse_mode": "dense"}
    module = make_module(OptimType.EXACT_SGD, [(2, 4)], **keywords)
    # A quarter of the smallest float32 is rounded to zero, in the row that is not looked up.
    fill(module, [torch.full((2, 4), 1e-45)])
    assert measure(module)[0].nonzero_rows == 2
    module(torch.tensor([0]), torch.tensor([0, 1])).sum().backward()
    (table,) = measure(module)
    assert table.nonzero_rows == 1


def _collections() -> torch.nn.ModuleDict:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(name="a", num_embeddings=4, embedding_dim=4)])
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name="a", num_embeddings=4, embedding_dim=4),
            EmbeddingConfig(name="b", num_embeddings=4, embedding_dim=4),
        ]
    )
    for weight in (*bags.parameters(), *sequences.parameters()):
        weight.data.copy_(WEIGHT)
    return torch.nn.ModuleDict({"x": bags, "y": sequences, "z": torch.nn.Linear(4, 4)})


def test_collections_anywhere_in_a_model() -> None:
    tables = measure(_collections())
    assert [each.table for each in tables] == ["x.a", "y.a", "b"]
    assert all(_figures(each) == EXPECTED for each in tables)


SHARDED = (Table("t0", 23, 8, ("f0",)), Table("t1", 11, 8, ("f1",)), Table("t2", 1, 8, ("f2",)))


def _weights() -> dict[str, torch.Tensor]:
    weights = {"t0": torch.zeros(23, 8), "t1": torch.zeros(11, 8), "t2": torch.zeros(1, 8)}
    weights["t0"][3, 0] = 1.0  # in the first column shard
    weights["t0"][20] = 1.0  # in all column shards, and the last row shard
    weights["t0"][21, 7] = 1.0  # in the last column shard
    weights["t1"][:] = 1.0
    return weights


def _measure_sharded(sharding_type: str, pooled: bool, precision: str) -> list[TableSparsity]:
    fused: dict[str, Any] = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    model = Model(SHARDED, pooled=pooled)
    if precision == "fp16":
        configs = model.ebc.embedding_bag_configs()
        for config in configs:
            config.data_type = DataType.FP16
        model.ebc = EmbeddingBagCollection(configs)
    sharders = [sharder(fused)]
    sharded = shard(model, sharders, plan_for(model, sharders, sharding_type, SHARDED))
    write_weights(sharded, _weights())
    return measure(sharded)


@pytest.mark.parametrize(
    ("sharding_type", "pooled", "precision"),
    [
        ("table_wise", True, "fp32"),
        ("row_wise", True, "fp32"),
        ("column_wise", True, "fp32"),
        ("grid_shard", True, "fp32"),
        ("row_wise", False, "fp32"),
        ("column_wise", False, "fp32"),
        ("table_wise", True, "fp16"),
    ],
)
def test_every_rank_gets_the_figures_of_whole_tables(
    sharding_type: str, pooled: bool, precision: str
) -> None:
    first, second = run_on_ranks(2, _measure_sharded, sharding_type, pooled, precision)
    assert first == second
    expected = {name: measure(weight)[0] for name, weight in _weights().items()}
    assert {each.table for each in first} == expected.keys()
    for each in first:
        assert _figures(each) == _figures(expected[each.table]), each.table
        assert each.dtype == (torch.float16 if precision == "fp16" else torch.float32)


def test_what_cannot_be_measured_is_named() -> None:
    with pytest.raises(TypeError, match="cannot measure a int"):
        measure(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="table 'a' is a list"):
        measure({"a": [0.0]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"table 'a' has the shape \(3,\); expected \[rows, dim\]"):
        measure({"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="Linear holds no embedding table"):
        measure(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="table 'a' is on the meta device"):
        measure({"a": torch.zeros(3, 3, device="meta")})


def test_the_table_for_people() -> None:
    tables = [*measure({"a": WEIGHT, "b": torch.ones(2, 1)})]
    lines = [line.split() for line in format_sparsity(tables).splitlines()]
    assert lines[1] == ["a", "4", "4", "float32", "2", "50.0%", "5", "68.8%", "64", "40"]
    assert lines[2] == ["b", "2", "1", "float32", "2", "0.0%", "2", "0.0%", "8", "16"]
    assert lines[3] == ["all", "tables", "6", "4", "33.3%", "7", "61.1%", "72", "56"]
    _, *empty = format_sparsity(measure(torch.zeros(0, 3))).splitlines()
    assert all(line.split()[-5::2] == ["0.0%", "0.0%", "0"] for line in empty)
