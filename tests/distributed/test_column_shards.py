"""How the planner cuts tables of any width into column shards, and what it counts."""

from __future__ import annotations

from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torchrec_ext import OptimType
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
)

from . import any_width, models, planning
from .ranks import run_on_ranks


def _cut(dim: int, least: int | None, sharding_type: str, optimizer: Any, device: str) -> list:
    """Sizes and offsets of the planner's shards of a table with 9 rows, on two hosts of two."""
    module = planning.collection(rows=9, dim=dim)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer})
    (option,) = planning.options_of(
        module, sharder, device, sharding_types=[sharding_type], kernels=["fused"], columns=least
    )
    return [(tuple(shard.size), tuple(shard.offset)) for shard in option.shards]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("dim", "least", "widths"),
    [
        (6, 1, [1] * 6),
        (6, 2, [2] * 3),
        (6, 3, [3] * 2),
        (6, 4, [6]),
        (7, 2, [7]),
        (9, 2, [3] * 3),
        (1, 1, [1]),
        (130, 65, [65] * 2),
        (258, None, [129] * 2),  # TorchRec's least without a constraint is 128
        (8, 2, [4] * 2),
        (12, 3, [4] * 3),
    ],
)
def test_the_planner_cuts_by_torchrecs_rule(dim, least, widths, device):
    offsets = [sum(widths[:k]) for k in range(len(widths))]
    whole = [((9, w), (0, o)) for w, o in zip(widths, offsets, strict=True)]
    for sharding_type in ("column_wise", "table_column_wise"):
        assert _cut(dim, least, sharding_type, OptimType.FTRL, device) == whole
    halves = [
        part
        for w, o in zip(widths, offsets, strict=True)
        for part in (((5, w), (0, o)), ((4, w), (5, o)))
    ]
    assert _cut(dim, least, "grid_shard", OptimType.FTRL, device) == halves


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_of_fbgemms_optimizers_are_planned_as_torchrec_plans_them(device):
    assert _cut(6, 2, "column_wise", EmbOptimType.EXACT_ADAGRAD, device) == [((9, 6), (0, 0))]


@pytest.mark.parametrize("sharding_type", any_width.SHARDING_TYPES)
@pytest.mark.parametrize(
    ("optimizer", "row_bytes"),
    [(OptimType.FTRL, (8, 0)), (OptimType.PARTIAL_ROWWISE_ADAM, (4, 4))],
)
def test_the_planner_counts_and_the_modules_allocate_true_widths(
    optimizer, row_bytes, sharding_type
):
    """Bytes of states: so many for each column and for each row of a shard."""
    by_column, by_row = row_bytes
    plain = (planning.collection(rows=9, dim=9), any_width.sharder_of(OptimType.EXACT_SGD, True))
    found = planning.states_storage(
        planning.collection(rows=9, dim=9),
        any_width.sharder_of(optimizer, True),
        plain,
        sharding_types=[sharding_type],
        columns=any_width.COLUMNS,
    )
    shards = {"table_wise": [(9, 9)], "column_wise": [(9, 3)] * 3}
    shards["row_wise"] = [(3, 9)] * 3 + [(0, 9)]
    expected = [(0, rows * (by_column * dim + by_row)) for rows, dim in shards[sharding_type]]
    assert found == {("t0", sharding_type, "fused"): expected}

    def allocated() -> dict[str, int]:
        modules = models.modules_by_table(
            any_width.sharded_model(optimizer, sharding_type, any_width.TABLES)
        )
        sizes = {}
        for module in {id(module): module for module in modules.values()}.values():
            for name, states in zip(module.table_names, module.get_optimizer_state(), strict=True):
                sizes[name] = sizes.get(name, 0) + sum(state.nbytes for state in states.values())
        return sizes

    sizes = run_on_ranks(2, allocated)
    for table in any_width.TABLES:
        shards_of_columns = (
            table.dim // any_width.shard_widths(sharding_type, any_width.TABLES)[table.name]
        )
        total = table.rows * (by_column * table.dim + by_row * shards_of_columns)
        assert sum(part.get(table.name, 0) for part in sizes) == total
