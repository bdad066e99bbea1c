"""FTRL: worked numbers, and single updates and trajectories against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from torchrec_ext import OptimType, ops
from torchrec_ext.optimizers import spec_of

from .. import reference
from ..modules import make_module, relative_error, single_step

SETTINGS = [
    {"ftrl_beta": 0.0, "l1_reg": 0.0, "l2_reg": 0.0},
    {"ftrl_beta": 1.0, "l1_reg": 0.0, "l2_reg": 0.1},
    {"ftrl_beta": 1.0, "l1_reg": 0.5, "l2_reg": 0.0},
    {"ftrl_beta": 0.1, "l1_reg": 1.0, "l2_reg": 1.0},
]
POWERS = [-0.5, -0.3, -0.9]


def _module(weight: float, **hyperparameters: float):
    module = make_module(OptimType.FTRL, [(3, 4)], learning_rate=0.1, **hyperparameters)
    module.split_embedding_weights()[0].fill_(weight)
    return module


def _states(module) -> tuple[float, float]:
    linear, accum = module.split_optimizer_states()[0]
    return float(linear[0, 0]), float(accum[0, 0])


def test_one_step() -> None:
    module = _module(1.0, initial_accumulator_value=0.1)
    assert single_step(module, 1.0) == pytest.approx(0.6031424, abs=1e-6)


def test_l1_holds_the_weight_at_zero_until_the_gradient_overcomes_it() -> None:
    module = _module(0.0, ftrl_beta=1.0, l1_reg=0.5)
    assert single_step(module, 0.4) == 0.0
    assert single_step(module, 0.4) == pytest.approx(-0.0191609, abs=1e-6)
    linear, accum = _states(module)
    assert (linear, accum) == (pytest.approx(0.8, abs=1e-6), pytest.approx(0.32, abs=1e-6))


def test_linear_equal_to_l1_gives_exactly_zero() -> None:
    for gradient in (0.5, -0.5):
        weight = single_step(_module(0.0, ftrl_beta=1.0, l1_reg=0.5), gradient)
        # The formula for |linear| > l1 would give -0.
        assert weight == 0.0 and math.copysign(1.0, weight) == 1.0


def test_a_row_looked_up_twice_is_updated_once() -> None:
    module = _module(0.0, ftrl_beta=1.0)
    assert single_step(module, 0.1, times=2) == pytest.approx(-0.0166667, abs=1e-6)
    assert _states(module)[1] == pytest.approx(0.04, abs=1e-7)


def test_l2_is_the_papers() -> None:
    assert single_step(_module(0.0, l2_reg=0.5), 1.0) == pytest.approx(-0.095238, abs=1e-6)


def test_gradient_is_clipped_before_the_update() -> None:
    module = _module(0.0, ftrl_beta=1.0, gradient_clipping=True, max_gradient=1.0)
    assert single_step(module, 5.0) == pytest.approx(-0.05, abs=1e-7)
    assert _states(module)[1] == 1.0


@pytest.mark.parametrize(
    "beta, accum, gradient, weight",
    [(0.0, 0.0, 0.01, 0.9), (1.0, 0.0, 0.01, 0.00891), (0.0, 0.1, 0.0, 0.0)],
)
def test_first_touch_discards_the_initial_weight(beta, accum, gradient, weight) -> None:
    module = _module(1.0, ftrl_beta=beta, initial_accumulator_value=accum)
    assert single_step(module, gradient) == pytest.approx(weight, abs=1e-5)


def test_tiny_first_gradient_keeps_almost_nothing() -> None:
    module = _module(1.0, initial_accumulator_value=0.1)
    step = 1e-4 * 0.1 / math.sqrt(0.1)
    assert single_step(module, 1e-4) + step == pytest.approx(5e-8, abs=5e-8)


def test_weight_stays_where_the_denominator_is_zero() -> None:
    assert single_step(_module(0.7), 0.0) == pytest.approx(0.7)


def test_power_zero_is_a_constant_rate() -> None:
    module = _module(0.0, learning_rate_power=0.0)
    assert single_step(module, 1.0) == pytest.approx(-0.1)
    assert single_step(module, 1.0) == pytest.approx(-0.2)


def _update(weight, gradient, linear, accum, **hyperparameters) -> None:
    """One update of ``[rows, D]`` tensors in place, through the op."""
    rows, dim = weight.shape
    spec = spec_of(OptimType.FTRL)
    ops.fused_update(
        gradient,
        weight.view(-1),
        [linear.view(-1), accum.view(-1)],
        torch.tensor([[rows, dim, 0, 0, 0]]),
        torch.tensor([0]),
        torch.arange(rows),
        torch.arange(rows + 1),
        None,
        pooling_mode=ops.POOLING_SUM,
        optimizer=OptimType.FTRL,
        hyperparameters=[
            spec.resolve(hyperparameters)[name] for name in spec.kernel_hyperparameters
        ],
    )


@pytest.mark.parametrize("seeded", [False, True], ids=["zero-accum", "seeded-accum"])
@pytest.mark.parametrize("power, setting", list(itertools.product(POWERS, SETTINGS)))
def test_single_updates_from_random_states(power, setting, seeded) -> None:
    rows, dim = 700, 64  # times 24 cases: 1,075,200 updates
    weight = torch.randn(rows, dim)
    linear = torch.randn(rows, dim) * 2.0
    accum = torch.rand(rows, dim) * 10.0 if seeded else torch.zeros(rows, dim)
    gradient = torch.randn(rows, dim) * 10.0 ** torch.randint(-4, 1, (rows, 1))
    hyperparameters = {"learning_rate": 0.1, "learning_rate_power": power, **setting}
    states = [linear.double(), accum.double()]
    expected = reference.ftrl(weight.double(), gradient.double(), states, 1, **hyperparameters)
    _update(weight, gradient, linear, accum, **hyperparameters)
    # Where |linear| is within rounding of l1, either side of the threshold is right.
    l1 = setting["l1_reg"]
    rounding = 4e-7 * (states[0].abs() + weight.double().abs() * 100.0)
    near = (states[0].abs() - l1).abs() <= rounding
    if l1 > 0.0:
        assert torch.equal((weight == 0.0) | near, (expected == 0.0) | near)
    assert relative_error(weight[~near], expected[~near]) <= 5e-6
    assert relative_error(accum, states[1]) <= 5e-6


@pytest.mark.parametrize("power, setting", list(itertools.product(POWERS, SETTINGS)))
def test_trajectories(power, setting) -> None:
    rows, dim = 20, 16
    weight = torch.randn(rows, dim)
    linear, accum = torch.zeros(rows, dim), torch.full((rows, dim), 0.1)
    expected, states = weight.double(), [linear.double(), accum.double()]
    hyperparameters = {"learning_rate": 0.1, "learning_rate_power": power, **setting}
    for _ in range(200):
        gradient = torch.randn(rows, dim)
        expected = reference.ftrl(expected, gradient.double(), states, 1, **hyperparameters)
        _update(weight, gradient, linear, accum, **hyperparameters)
        # At the threshold the two may differ by what the threshold cuts off, which is no more.
        assert relative_error(weight, expected) <= 5e-5


def test_power_path_agrees_with_square_root_path() -> None:
    almost = math.nextafter(-0.5, 0.0)
    start = [torch.randn(500, 64), torch.randn(500, 64), torch.rand(500, 64) * 10.0]
    gradient = torch.randn(500, 64)
    results = []
    for power in (-0.5, almost):
        weight, linear, accum = (tensor.clone() for tensor in start)
        _update(
            weight,
            gradient,
            linear,
            accum,
            learning_rate=0.1,
            ftrl_beta=1.0,
            l2_reg=0.1,
            learning_rate_power=power,
        )
        results.append(weight)
    assert relative_error(results[1], results[0]) <= 5e-7


@pytest.mark.parametrize("power", [-1e-3, -0.3, -0.9, -3.0])
def test_powers_over_the_whole_range(power) -> None:
    """With beta = linear = 0 and a weight of 0, w' = -g * lr / accum'^p shows accum'^p."""
    exponents = torch.arange(-60, 60, dtype=torch.float64)
    gradient = (2.0**exponents * 1.37).float().view(-1, 1).expand(-1, 4).contiguous()
    weight = torch.zeros_like(gradient)
    linear, accum = torch.zeros_like(gradient), torch.zeros_like(gradient)
    _update(weight, gradient, linear, accum, learning_rate=1.0, learning_rate_power=power)
    squares = accum.double()
    raised = squares**-power
    expected = -gradient.double() / raised
    inside = torch.ones_like(squares, dtype=torch.bool)
    for magnitude in (squares, raised, expected.abs()):  # normal floats all the way
        inside &= (magnitude > 1e-37) & (magnitude < 3e38)
    error = ((weight.double() - expected) / expected).abs()[inside]
    assert inside.sum() > 100
    assert error.max() <= 1.5e-7


def test_not_a_number_stays_one() -> None:
    for power in (-0.5, -0.3):
        module = _module(1.0, ftrl_beta=1.0, learning_rate_power=power)
        assert math.isnan(single_step(module, math.nan))
        assert not torch.isnan(module.split_embedding_weights()[0][1:]).any()
