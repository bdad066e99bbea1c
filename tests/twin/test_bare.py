"""Bare twins against FBGEMM on the CPU, and that a twin can fail."""

from __future__ import annotations

import enum
import math

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.optimizers import HyperparameterError
from torchrec_ext.twin import BareTwin, Description, NoCounterpartError, Table, largest, table_of

PARITY = [OptimType.EXACT_SGD, OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD]
MIXED = (
    Table("t4", 30, 4),
    Table("t8", 200, 8, ("a", "b")),
    Table("t64", 50, 64),
    Table("t128", 7, 128, ("c", "d", "e")),
    Table("t516", 40, 516),
)


def _worst(steps: int = 20, **keywords) -> float:
    keywords.setdefault("hyperparameters", {"learning_rate": 0.1})
    found = list(BareTwin(Description(**keywords)).run(steps))
    # FBGEMM sums a weight's gradient over up to 516 columns one after another, in float32.
    assert all(d.value <= 1e-4 for d in found if d.quantity == "weight gradient")
    assert any(d.quantity == "weight gradient" for d in found) == keywords.get("weighted", False)
    return largest(d for d in found if d.quantity != "weight gradient").value


@pytest.mark.parametrize("optimizer", PARITY, ids=lambda o: o.name)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weighted": True},
        {"pooling": "mean"},
        {"index_dtype": torch.int32},
        {"max_gradient": 0.5},
        {"max_gradient": 0.5, "weighted": True},
        {"max_gradient": 0.5, "pooling": "mean"},
    ],
    ids=str,
)
def test_mixed_dims_and_shared_tables(optimizer, settings) -> None:
    assert _worst(tables=MIXED, optimizer=optimizer, **settings) <= 1e-5


@pytest.mark.parametrize("optimizer", PARITY, ids=lambda o: o.name)
def test_without_pooling(optimizer) -> None:
    tables = (Table("x", 30, 64), Table("y", 9, 64, ("a", "b")))
    assert _worst(tables=tables, optimizer=optimizer, pooling="none") <= 1e-5


@pytest.mark.parametrize("optimizer", PARITY, ids=lambda o: o.name)
def test_half_weights(optimizer) -> None:
    description = Description(
        MIXED, optimizer, {"learning_rate": 0.1}, weights_precision="fp16", batch_size=4
    )
    found = [d for d in BareTwin(description).run(1) if d.quantity == "weight"]
    # FBGEMM's SGD rounds after every lookup of a row, the others once.
    units = 8 if optimizer == OptimType.EXACT_SGD else 1
    assert largest(found).value <= units * 2.0**-10


def test_initial_accumulator_is_copied() -> None:
    hyperparameters = {"learning_rate": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.1}
    for optimizer in PARITY[1:]:
        worst = _worst(tables=MIXED, optimizer=optimizer, hyperparameters=hyperparameters)
        assert worst <= 1e-5


def test_another_learning_rate_is_found() -> None:
    twin = BareTwin(Description(MIXED, OptimType.EXACT_SGD, {"learning_rate": 0.1}))
    twin.ours.set_learning_rate(0.2)
    assert largest(twin.run(1)).quantity == "weight"
    assert largest(twin.run(1)).value > 1e-2


def test_a_changed_weight_is_found_where_it_is() -> None:
    twin = BareTwin(Description(MIXED, OptimType.EXACT_ADAGRAD))
    twin.ours.split_embedding_weights()[1][150, 3] += 0.5
    description = Description(MIXED, OptimType.EXACT_ADAGRAD, batch_size=1, longest_bag=0)
    twin.description = description  # batches that look up nothing leave the weight as it is
    found = largest(twin.run(1))
    assert (found.quantity, found.table, found.row, found.column) == ("weight", "t8", 150, 3)
    assert found.ours - found.theirs == pytest.approx(0.5)
    assert "table 't8' at row 150, column 3 after step 1" in str(found)


def test_a_changed_state_is_found_and_nan_is_worst() -> None:
    twin = BareTwin(Description(MIXED, OptimType.EXACT_ROWWISE_ADAGRAD, batch_size=1))
    twin.ours.split_optimizer_states()[2][0][49] = math.nan
    twin.ours.split_embedding_weights()[0][0, 0] += 100.0
    found = largest(twin.run(1))
    assert (found.quantity, found.table, found.row) == ("sum", "t64", 49)
    assert math.isnan(found.value)
    assert "sum" in table_of([found]) and "nan" in table_of([found])


def test_what_has_no_counterpart() -> None:
    with pytest.raises(NoCounterpartError, match="no FTRL.*float64 reference"):
        Description(MIXED, OptimType.FTRL)
    with pytest.raises(NoCounterpartError, match="ADAM runs on GPUs only"):
        Description(MIXED, OptimType.ADAM)
    with pytest.raises(NoCounterpartError, match="weight_decay=0.1.*leave it at 0.0"):
        Description(MIXED, OptimType.EXACT_ROWWISE_ADAGRAD, {"weight_decay": 0.1})
    with pytest.raises(NoCounterpartError, match="momentum=0.9"):
        Description(MIXED, OptimType.EXACT_SGD, {"momentum": 0.9})
    with pytest.raises(NoCounterpartError, match="does not divide"):
        Description(MIXED, OptimType.EXACT_SGD, weighted=True, pooling="mean")


def test_a_newer_fbgemm_brings_the_counterpart(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = enum.Enum("EmbOptimType", {"FTRL": "ftrl"})
    monkeypatch.setattr("fbgemm_gpu.split_embedding_configs.EmbOptimType", newer)
    description = Description(MIXED, OptimType.FTRL, {"l1_reg": 0.1})
    assert description.optimizer.counterpart is newer["FTRL"]
    assert description.fbgemm_hyperparameters["l1_reg"] == 0.1


def test_bad_descriptions() -> None:
    with pytest.raises(ValueError, match="tables must have unique names"):
        Description((Table("x", 3, 4), Table("x", 3, 4)), OptimType.EXACT_SGD)
    with pytest.raises(ValueError, match="features must have unique names"):
        Description((Table("x", 3, 4, ("f",)), Table("y", 3, 4, ("f",))), OptimType.EXACT_SGD)
    with pytest.raises(ValueError, match="needs pooling"):
        Description(MIXED, OptimType.EXACT_SGD, weighted=True, pooling="none")
    with pytest.raises(HyperparameterError, match="no hyperparameter 'eps'"):
        Description(MIXED, OptimType.EXACT_SGD, {"eps": 1.0})
