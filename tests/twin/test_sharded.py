"""Sharded twins on two gloo ranks."""

from __future__ import annotations

import pytest

from torchrec_ext import OptimType
from torchrec_ext.twin import Description, Difference, ShardedTwin, Table, largest

from ..distributed.ranks import run_on_ranks
from .test_bare import PARITY

TABLES = (Table("t8", 30, 8), Table("t64", 50, 64, ("a", "b")), Table("t128", 7, 128))


def _worst(description: Description, sharding_type: str, steps: int = 20) -> Difference:
    return largest(ShardedTwin(description, sharding_type).run(steps))


@pytest.mark.parametrize("optimizer", PARITY, ids=lambda o: o.name)
@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise"])
@pytest.mark.parametrize("settings", [{}, {"weighted": True}, {"pooling": "mean"}], ids=str)
def test_embedding_bag_collection(optimizer, sharding_type, settings) -> None:
    description = Description(TABLES, optimizer, {"learning_rate": 0.1}, **settings)
    for found in run_on_ranks(2, _worst, description, sharding_type):
        assert found.value <= 1e-5, str(found)


@pytest.mark.parametrize("optimizer", PARITY, ids=lambda o: o.name)
@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise"])
def test_embedding_collection(optimizer, sharding_type) -> None:
    tables = (Table("x", 30, 8), Table("y", 9, 8, ("a", "b")))
    description = Description(tables, optimizer, {"learning_rate": 0.1}, pooling="none")
    for found in run_on_ranks(2, _worst, description, sharding_type):
        assert found.value <= 1e-5, str(found)


def _worst_of_another_rate(description: Description) -> Difference:
    twin = ShardedTwin(description, "table_wise")
    twin.ours.fused_optimizer.param_groups[0]["lr"] = 0.2
    twin.ours.fused_optimizer.step()
    return largest(twin.run(2))


def test_a_sharded_twin_can_fail() -> None:
    description = Description(TABLES, OptimType.EXACT_ADAGRAD, {"learning_rate": 0.1})
    found = run_on_ranks(2, _worst_of_another_rate, description)
    assert max(difference.value for difference in found) > 1e-3
