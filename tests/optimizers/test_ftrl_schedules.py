"""FTRL under learning rates that change: what moves, with and without multiply_linear_by_lr."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import fill, make_module, relative_error, single_step

STEPS, PEAK = 200, 0.1


def _rate(step: int) -> float:
    """Warm-up over a tenth of the steps, then a cosine down to a hundredth of the peak."""
    warm = STEPS // 10
    if step < warm:
        return PEAK * (step + 1) / warm
    share = 0.5 * (1.0 + math.cos(math.pi * (step - warm) / (STEPS - warm)))
    return PEAK * (0.01 + 0.99 * share)


def _module(weight: float, **hyperparameters: Any):
    """A row of this weight, seeded in an update with a zero gradient at learning rate .1."""
    given = {"learning_rate": 0.1, "ftrl_beta": 1.0, "preserve_initial_weight": True}
    module = make_module(OptimType.FTRL, [(1, 4)], **{**given, **hyperparameters})
    fill(module, [torch.full((1, 4), weight)])
    assert single_step(module, 0.0) == pytest.approx(weight, abs=1e-6)
    return module


@pytest.mark.parametrize(
    "given, weight",
    [
        ({"multiply_linear_by_lr": False}, 0.485),
        ({"multiply_linear_by_lr": True}, 0.97),
        ({"multiply_linear_by_lr": True, "l1_reg": 0.5}, 0.995),
        ({"multiply_linear_by_lr": True, "l2_reg": 5.0}, 1.164),
    ],
    ids=str,
)
def test_halving_the_learning_rate(given, weight) -> None:
    """beta = 1, accum = 0, from lr = .1 to .05, and zero gradients."""
    module = _module(0.97, **given)
    module.set_learning_rate(0.05)
    assert single_step(module, 0.0) == pytest.approx(weight, abs=1e-6)


def _run(multiplied: bool, accum: float, power: float) -> tuple[list[float], float]:
    """The weights at each step of the schedule, without gradients, and the first."""
    module = _module(
        0.97,
        multiply_linear_by_lr=multiplied,
        initial_accumulator_value=accum,
        learning_rate_power=power,
    )
    first = float(module.split_embedding_weights()[0][0, 0])
    found = []
    for step in range(STEPS):
        module.set_learning_rate(_rate(step))
        found.append(single_step(module, 0.0))
    return found, first


@pytest.mark.parametrize("power", [-0.5, -0.7])
@pytest.mark.parametrize("accum", [0.0, 0.1])
def test_a_cosine_schedule_with_warm_up_moves_nothing_where_linear_is_multiplied(
    accum, power
) -> None:
    found, first = _run(True, accum, power)
    assert max(abs(weight - first) for weight in found) < 1e-6


def test_in_the_plain_form_weights_follow_the_learning_rate() -> None:
    found, first = _run(False, 0.1, -0.5)
    expected = [first * _rate(step) / 0.1 for step in range(STEPS)]
    errors = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < 1e-6
    assert max(abs(weight - first) for weight in found) > 0.9


def test_at_a_constant_learning_rate_both_forms_train_alike() -> None:
    given = {"learning_rate": 0.05, "ftrl_beta": 1.0, "l1_reg": 0.2, "l2_reg": 0.1, "l21_reg": 0.1}
    modules = [
        make_module(OptimType.FTRL, [(8, 12)], **given, multiply_linear_by_lr=multiplied)
        for multiplied in (False, True)
    ]
    for _ in range(100):
        gradient = torch.randn(8, 12)
        for module in modules:
            module(torch.arange(8), torch.arange(9)).backward(gradient)
    plain, multiplied = (module.split_embedding_weights()[0] for module in modules)
    assert relative_error(multiplied, plain) <= 2e-6
    linears = [module.split_optimizer_states()[0][0] for module in modules]
    assert relative_error(linears[1], linears[0] * 0.05) <= 2e-6
    assert plain.count_nonzero() > 0
