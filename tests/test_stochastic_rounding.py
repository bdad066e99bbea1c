"""Stochastic rounding of half weights: to a neighbour, unbiased, with a counter-based key."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchrec_ext import OptimType, ops

from .modules import kernel_values


def _round(values: Tensor, seed: int = 0, step: int = 0, rows: Tensor | None = None) -> Tensor:
    """Rounds float32 ``[rows, D]`` values: zero half weights step by minus the value."""
    count, dim = values.shape
    rows = torch.arange(count) if rows is None else rows
    weights = torch.zeros(count * dim, dtype=torch.float16)
    ops.fused_update(
        -values,
        weights,
        [],
        torch.tensor([[count, dim, 0]]),
        torch.tensor([0]),
        rows,
        torch.arange(count + 1),
        None,
        pooling_mode=ops.POOLING_SUM,
        optimizer=OptimType.EXACT_SGD,
        hyperparameters=kernel_values(OptimType.EXACT_SGD, lr=1.0),
        stochastic_rounding=True,
        seed=seed,
        step=step,
    )
    return weights.view(count, dim)


def _neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest half <= and the least half >= each value."""
    nearest = values.half()
    bits = nearest.view(torch.int16)
    away = torch.where(nearest.float().abs() < values.abs(), bits + 1, bits).view(torch.float16)
    towards = torch.where(nearest.float().abs() > values.abs(), bits - 1, bits).view(torch.float16)
    return towards, away


@pytest.mark.parametrize("scale", [1.0, 1e-3, 2.0**-14, 1e-5, 1e-7, 3e4])
def test_rounds_to_a_neighbour(scale) -> None:
    values = (torch.rand(200, 64) * 2.0 - 1.0) * scale
    found = _round(values)
    towards, away = _neighbours(values)
    assert ((found == towards) | (found == away)).all()
    between = towards != away
    assert 0.3 < (found == away)[between].float().mean() < 0.7


def test_exact_values_stay() -> None:
    values = torch.randn(50, 64).half().float()
    values[0, :6] = torch.tensor([0.0, 65504.0, -65504.0, 2.0**-24, 2.0**-14, 2.0**-15])
    assert torch.equal(_round(values), values.half())


def test_infinity_and_nan_stay() -> None:
    values = torch.tensor([[math.inf, -math.inf, math.nan, 1.0]])
    assert torch.equal(_round(values).isnan(), values.isnan())
    assert _round(values)[0, :2].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("value", [1.0 + 0.3 * 2.0**-10, -0.1, 2.7 * 2.0**-24, 0.1 * 2.0**-24])
def test_is_unbiased(value) -> None:
    samples = 64 * 4000
    found = _round(torch.full((4000, 64), value)).double()
    step = float(found.max() - found.min())
    assert step > 0.0
    standard_error = step / 2.0 / math.sqrt(samples)
    assert abs(float(found.mean()) - value) <= 4.0 * standard_error + abs(value) * 6e-8


def test_depends_on_seed_step_row_and_column_alone() -> None:
    values = torch.full((100, 64), 1.0 + 2.0**-11)
    found = _round(values, seed=3, step=5)
    assert torch.equal(_round(values, seed=3, step=5), found)
    assert torch.equal(_round(values, seed=3, step=5, rows=torch.randperm(100)), found)
    for other in (_round(values, seed=4, step=5), _round(values, seed=3, step=6), found.roll(1, 0)):
        assert 0.4 < (other == found).float().mean() < 0.6
    assert 0.4 < (found.roll(1, 1) == found).float().mean() < 0.6
