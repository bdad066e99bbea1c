"""FTRL with preserve_initial_weight, and linear derived from weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import (
    HALF,
    assert_same_bits,
    fill,
    make_module,
    random_tables,
    relative_error,
    single_step,
    snapshot,
)

ROWS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {"initial_accumulator_value": 0.1},
    "l1": {"ftrl_beta": 1.0, "l1_reg": 0.5},
    "l1 and l2": {"l1_reg": 0.5, "l2_reg": 1.0, "learning_rate_power": -0.7},
    "l21": {"ftrl_beta": 1.0, "l1_reg": 0.1, "l21_reg": 0.3},
    "multiplied": {"ftrl_beta": 1.0, "l1_reg": 0.5, "multiply_linear_by_lr": True},
    "multiplied l21": {"ftrl_beta": 1.0, "l21_reg": 0.5, "multiply_linear_by_lr": True},
}
settings = pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS)


def _module(**hyperparameters: Any):
    given = {"learning_rate": 0.1, "preserve_initial_weight": True, **hyperparameters}
    return make_module(OptimType.FTRL, [(ROWS, 8)], table_names=["user"], **given)


def _filled(start: torch.Tensor, **hyperparameters: Any):
    module = _module(**hyperparameters)
    fill(module, [start])
    return module


def _touch(module, gradient: float = 0.0) -> torch.Tensor:
    """Updates every row; gives the weights."""
    output = module(torch.arange(ROWS), torch.arange(ROWS + 1))
    output.backward(torch.full_like(output, gradient))
    return module.split_embedding_weights()[0]


def _new_rows(module) -> list[int]:
    """The rows that bear the mark, which a row bears in all of its columns."""
    linear = module.split_optimizer_states()[0][0]
    marked = (linear == 0.0) & linear.signbit()
    assert torch.equal(marked.all(1), marked.any(1))
    return marked.all(1).nonzero().flatten().tolist()


def test_worked_numbers() -> None:
    given = {"ftrl_beta": 1.0, "l1_reg": 0.5, "initial_accumulator_value": 0.1}
    module = _filled(torch.ones(ROWS, 8), **given)
    assert single_step(module, 0.0, row=0) == pytest.approx(1.0, abs=1e-6)
    linear = module.split_optimizer_states()[0][0]
    assert float(linear[0, 0]) == pytest.approx(-13.66228, abs=1e-5)
    assert single_step(module, 0.01, row=1) == pytest.approx(0.99924, abs=5e-6)


@settings
@pytest.mark.parametrize("precision", [{}, HALF], ids=["fp32", "fp16"])
def test_zero_gradients_keep_the_initial_weights(given, precision) -> None:
    (start,) = random_tables([(ROWS, 8)])
    start[1] = 0.0
    module = _filled(start, **given, **precision)
    for _ in range(3):
        found = _touch(module)
        assert relative_error(found, start) <= (2e-3 if precision else 2e-6)
        assert found[1].count_nonzero() == 0
        assert _new_rows(module) == []


@settings
@pytest.mark.parametrize("dim", [1, 8])
def test_the_least_weights_stay_small(given, dim) -> None:
    """Also where the squares under a norm are subnormal, with few digits."""
    rows = 600
    start = (10.0 ** torch.linspace(-46, -15, rows)).view(rows, 1).expand(rows, dim)
    module = make_module(
        OptimType.FTRL, [(rows, dim)], learning_rate=0.1, preserve_initial_weight=True, **given
    )
    fill(module, [start])
    output = module(torch.arange(rows), torch.arange(rows + 1))
    output.backward(torch.zeros_like(output))
    assert float(module.split_embedding_weights()[0].abs().max()) < 1e-6


@settings
def test_without_preserving_they_are_lost(given) -> None:
    (start,) = random_tables([(ROWS, 8)])
    module = _filled(start, **{**given, "preserve_initial_weight": False})
    assert (_touch(module) == 0.0).all()


def test_one_update_takes_the_mark_and_no_other_row_is_read_or_written() -> None:
    module = _filled(torch.ones(ROWS, 8), ftrl_beta=1.0)
    assert _new_rows(module) == list(range(ROWS))
    before = snapshot(module)
    single_step(module, -0.0, row=2)
    assert _new_rows(module) == [0, 1, 3, 4, 5]
    for old, new in zip(before, snapshot(module), strict=True):
        assert torch.equal(old[3:], new[3:]) and torch.equal(old[:2], new[:2])


def test_zero_weights_and_zero_gradients_take_the_mark_as_well() -> None:
    for zero in (0.0, -0.0):
        module = _filled(torch.full((ROWS, 8), zero), ftrl_beta=1.0, l1_reg=0.5)
        _touch(module, -0.0)
        assert _new_rows(module) == []
        module.split_embedding_weights()[0].fill_(1.0)  # too late: linear is that of a zero weight
        assert (_touch(module) == 0.0).all()


@settings
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_weights_train_as_without_preserving(given, zero) -> None:
    start = torch.full((ROWS, 8), zero)
    modules = [_filled(start, **{**given, "preserve_initial_weight": on}) for on in (True, False)]
    for gradient in (0.01, -0.3, 0.9):
        for module in modules:
            _touch(module, gradient)
        assert_same_bits(*(snapshot(module) for module in modules))
    assert snapshot(modules[0])[0].count_nonzero() > 0


@settings
def test_hyperparameters_are_those_of_the_first_update(given) -> None:
    (start,) = random_tables([(ROWS, 8)])
    changed, built = _filled(start, **given), None
    other = {"learning_rate": 0.03, "l1_reg": 0.2, "ftrl_beta": 0.7}
    changed.update_hyper_parameters(other)
    built = _filled(start, **{**given, **other})
    for module in (changed, built):
        _touch(module, 0.01)
    assert_same_bits(snapshot(changed), snapshot(built))


@settings
def test_a_reset_row_starts_from_the_weight_that_is_there(given) -> None:
    (start,) = random_tables([(ROWS, 8)])
    module = _filled(start, **given)
    _touch(module, 1.0)
    module.reset_optimizer_states("user", rows=[1, 4])
    assert _new_rows(module) == [1, 4]
    module.set_learning_rate(0.02)
    weights = module.split_embedding_weights()[0]
    weights[4] = 3.0
    expected = weights[[1, 4]].clone()
    assert relative_error(_touch(module)[[1, 4]], expected) <= 2e-6


def test_evicted_rows_keep_the_fresh_weight_that_is_written_afterwards() -> None:
    module = _filled(torch.ones(ROWS, 8), ftrl_beta=1.0, l1_reg=0.5)
    _touch(module, 1.0)
    table, rows = torch.tensor([0]), torch.tensor([2, 3])
    module.reset_embedding_weight_momentum(rows, torch.tensor([0, 2]), table, table)
    assert _new_rows(module) == [2, 3]
    fresh = torch.linspace(-1.0, 1.0, 16).view(2, 8)
    module.split_embedding_weights()[0][rows] = fresh  # as TorchRec does after the call
    assert relative_error(_touch(module)[rows], fresh) <= 1e-6


def test_marks_go_through_checkpoints_and_stay_right_under_new_hyperparameters() -> None:
    (start,) = random_tables([(ROWS, 8)])
    module = _filled(start, ftrl_beta=1.0, l1_reg=0.5)
    single_step(module, 1.0, row=0)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    loaded = _module(ftrl_beta=1.0, l1_reg=0.5)
    loaded.load_state_dict(torch.load(saved))
    assert _new_rows(loaded) == [1, 2, 3, 4, 5]
    for each in (module, loaded):
        each.update_hyper_parameters({"learning_rate": 0.03, "l1_reg": 0.1})
        _touch(each, 0.01)
    assert_same_bits(snapshot(module), snapshot(loaded))
    copied = copy.deepcopy(_filled(start, ftrl_beta=1.0))
    assert _new_rows(copied) == list(range(ROWS))


def test_states_in_use_show_zero() -> None:
    linear = _module().get_optimizer_state()[0]["linear"]
    assert torch.equal(linear, torch.zeros(ROWS, 8))


@pytest.mark.parametrize("multiplied", [False, True])
def test_without_regularisation_it_is_adagrad(multiplied) -> None:
    (start,) = random_tables([(ROWS, 8)])
    common = {"learning_rate": 0.1, "initial_accumulator_value": 0.1}
    ftrl = _filled(start, **common, multiply_linear_by_lr=multiplied)
    adagrad = make_module(OptimType.EXACT_ADAGRAD, [(ROWS, 8)], eps=0.0, **common)
    fill(adagrad, [start])
    for _ in range(200):
        rows = torch.randint(0, ROWS, (4,))
        gradient = torch.randn(4, 8)
        for module in (ftrl, adagrad):
            module(rows, torch.arange(5)).backward(gradient)
    expected = adagrad.split_embedding_weights()[0]
    assert relative_error(ftrl.split_embedding_weights()[0], expected) <= 1e-5
    accum, sums = ftrl.split_optimizer_states()[0][1], adagrad.split_optimizer_states()[0][0]
    assert torch.equal(accum, sums)


def test_nothing_to_preserve_beside_without_any_scale() -> None:
    """beta = accum = l2 = 0: plain FTRL keeps the weights, and preserving changes no bit."""
    (start,) = random_tables([(ROWS, 8)])
    modules = [_filled(start, preserve_initial_weight=each) for each in (True, False)]
    for module in modules:
        _touch(module, 0.01)
    assert_same_bits(*(snapshot(module) for module in modules))
