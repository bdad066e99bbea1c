"""FTRL's extensions: all combinations against float64, worked numbers, what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_ext import OptimType, ops
from torchrec_ext.optimizers import HyperparameterError

from .. import reference
from ..modules import (
    HALF,
    fill,
    kernel_values,
    make_module,
    of_update,
    random_batch,
    random_tables,
    relative_error,
    run_forward,
    single_step,
)

EXTENSIONS: dict[str, Any] = {
    "preserve_initial_weight": True,
    "l2_shrinkage_reg": 0.1,
    "multiply_linear_by_lr": True,
    "l21_reg": 0.2,
}
COMBINATIONS = [
    dict(chosen)
    for count in range(len(EXTENSIONS) + 1)
    for chosen in itertools.combinations(EXTENSIONS.items(), count)
]
SHAPES = [(9, 4), (5, 36), (6, 132)]
BASE = {"ftrl_beta": 0.5, "l1_reg": 0.05, "l2_reg": 0.1, "initial_accumulator_value": 0.1}


def _name(combination: dict[str, Any]) -> str:
    return "+".join(combination) or "plain"


@pytest.mark.parametrize("power", [-0.5, -0.7])
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=_name)
def test_every_combination_equals_float64(combination, weights, power) -> None:
    """Step by step from the module's own weights and states, with a learning rate that changes."""
    given = {**BASE, "learning_rate": 0.1, "learning_rate_power": power, **combination}
    module = make_module(OptimType.FTRL, SHAPES, **given, **(HALF if weights == "fp16" else {}))
    fill(module, random_tables(SHAPES))
    for step in range(1, 7):
        module.set_learning_rate(0.1 / step)
        given["learning_rate"] = 0.1 / step
        tables = [table.double() for table in module.split_embedding_weights()]
        states = [[s.double() for s in table] for table in module.split_optimizer_states()]
        batch = random_batch([rows for rows, _ in SHAPES], 5, 3)
        output = run_forward(module, batch)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        reference.train_step(
            reference.ftrl, tables, states, [0, 1, 2], batch, gradient, step, **of_update(given)
        )
        rounding = 2**-11 if weights == "fp16" else 0.0
        for found, expected in zip(module.split_embedding_weights(), tables, strict=True):
            assert relative_error(found, expected) <= 2e-5 + rounding
        for found_states, expected_states in zip(
            module.split_optimizer_states(), states, strict=True
        ):
            for found, expected in zip(found_states, expected_states, strict=True):
                assert relative_error(found, expected) <= 2e-5
                assert torch.equal(found == 0.0, expected == 0.0)
                assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("combination", COMBINATIONS, ids=_name)
def test_every_combination_changes_the_update(combination) -> None:
    """What a combination leaves out is not there: each gives other weights than the others."""
    found = []
    for each in COMBINATIONS:
        module = make_module(OptimType.FTRL, [(1, 4)], learning_rate=0.1, **BASE, **each)
        fill(module, [torch.tensor([[1.0, -0.5, 0.25, 2.0]])])
        for rate in (0.1, 0.05):
            module.set_learning_rate(rate)
            single_step(module, 0.3)
        found.append(module.split_embedding_weights()[0].clone())
    own = COMBINATIONS.index(combination)
    others = found[:own] + found[own + 1 :]
    assert all((found[own] - other).abs().max() > 1e-4 for other in others)


def _op(weight, gradient, linear, accum, **hyperparameters: Any) -> None:
    rows, dim = weight.shape
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
        hyperparameters=kernel_values(OptimType.FTRL, **hyperparameters),
    )


def _random(rows: int = 400, dim: int = 20) -> list[torch.Tensor]:
    """Weight, gradient, linear and accum; some weights and gradients are 0, of either sign."""
    tensors = [torch.randn(rows, dim) for _ in range(3)] + [torch.rand(rows, dim)]
    for each in (*tensors[:2], tensors[3]):
        each[torch.rand(rows, dim) < 0.1] = 0.0
    tensors[1][torch.rand(rows, dim) < 0.1] = -0.0
    return tensors


def _numpy_update(weight, gradient, linear, accum, rate, beta, l1, l2) -> list[np.ndarray]:
    """The plain update, operation by operation in float32."""
    w, g, z, n = (each.numpy() for each in (weight, gradient, linear, accum))
    inverse, beta, l1, l2 = (np.float32(each) for each in (1.0 / rate, beta, l1, l2))
    squares = n + g * g
    step = (np.sqrt(squares) - np.sqrt(n)) * inverse * w
    z = z + g - step
    denominator = (beta + np.sqrt(squares)) * inverse + l2
    with np.errstate(divide="ignore", invalid="ignore"):
        shrunk = -(z - np.copysign(l1, z)) / denominator
    solution = np.where(np.abs(z) <= l1, np.float32(0.0), shrunk)
    return [np.where(denominator == 0.0, w, solution), z, squares]


@pytest.mark.parametrize("beta, l1, l2", [(0.0, 0.0, 0.0), (1.0, 0.5, 0.0), (0.1, 0.7, 0.3)])
def test_without_extensions_every_bit_is_the_formulas(beta, l1, l2) -> None:
    weight, gradient, linear, accum = _random()
    expected = _numpy_update(weight, gradient, linear, accum, 0.3, beta, l1, l2)
    _op(weight, gradient, linear, accum, lr=0.3, ftrl_beta=beta, l1_reg=l1, l2_reg=l2)
    for found, value in zip((weight, linear, accum), expected, strict=True):
        assert np.array_equal(found.numpy().view(np.int32), value.view(np.int32))


@pytest.mark.parametrize("power", [-0.5, -0.3])
@pytest.mark.parametrize(
    "extension", [{"preserve_initial_weight": True}, {"l2_shrinkage_reg": 1e-30}], ids=str
)
def test_extensions_without_effect_change_no_bit(extension, power) -> None:
    """Rows that were updated before; a shrinkage that float32 rounds away."""
    start = _random()
    results = []
    for each in ({}, extension):
        weight, gradient, linear, accum = (tensor.clone() for tensor in start)
        given = {"lr": 0.3, "ftrl_beta": 0.1, "l1_reg": 0.7, "learning_rate_power": power}
        _op(weight, gradient, linear, accum, **given, **each)
        results.append((weight, linear, accum))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_shrinkage_is_in_linear_and_not_in_accum() -> None:
    module = make_module(OptimType.FTRL, [(1, 4)], lr=0.1, ftrl_beta=1.0, l2_shrinkage_reg=0.25)
    fill(module, [torch.full((1, 4), 2.0)])
    single_step(module, 0.5)
    linear, accum = module.split_optimizer_states()[0]
    assert float(accum[0, 0]) == 0.25
    # g + 2 * l2_shrinkage_reg * weight - (.5 - 0) / .1 * weight
    assert float(linear[0, 0]) == pytest.approx(0.5 + 1.0 - 10.0, abs=1e-5)


def _group(norm_share: float, **hyperparameters: Any) -> torch.Tensor:
    """A new row of four zero weights after the gradients 3, -4, 0, 0 (norm 5)."""
    module = make_module(
        OptimType.FTRL, [(1, 4)], lr=0.1, ftrl_beta=1.0, l21_reg=2.5 * norm_share, **hyperparameters
    )
    module(torch.tensor([0]), torch.tensor([0, 1])).backward(torch.tensor([[3.0, -4.0, 0.0, 0.0]]))
    return module.split_embedding_weights()[0][0]


def test_group_lasso_scales_a_row_or_zeroes_it() -> None:
    # sqrt(D) is 2: the threshold is 5 * norm_share. Denominators are (1 + |g|) / .1.
    half = torch.tensor([-1.5 / 40.0, 2.0 / 50.0, 0.0, 0.0])
    assert relative_error(_group(0.5), half) <= 1e-7
    for share in (1.0, 1.0005, 1.5):
        row = _group(share)
        assert torch.equal(row, torch.zeros(4)) and not row.signbit().any()
    assert _group(0.999).count_nonzero() == 2


def test_group_lasso_comes_after_l1() -> None:
    # u is (-2, 3, 0, 0): norm sqrt(13), threshold 2.
    kept = 1.0 - 2.0 / math.sqrt(13.0)
    expected = torch.tensor([-2.0 * kept / 40.0, 3.0 * kept / 50.0, 0.0, 0.0])
    assert relative_error(_group(0.4, l1_reg=1.0), expected) <= 1e-7


@pytest.mark.parametrize("name", ["preserve_initial_weight", "multiply_linear_by_lr"])
def test_what_gives_linear_its_meaning_is_fixed(name) -> None:
    module = make_module(OptimType.FTRL, [(1, 4)], table_names=["user"])
    with pytest.raises(HyperparameterError, match=rf"\['user'\].*{name}=True cannot replace False"):
        module.update_hyper_parameters({name: True})
    module.update_hyper_parameters({name: False, "l21_reg": 0.5, "l2_shrinkage_reg": 0.25})
    assert module.hyperparameters["l21_reg"] == 0.5


@pytest.mark.parametrize("threshold", ["l1_reg", "l21_reg"])
def test_preserving_beside_a_threshold_needs_a_scale(threshold) -> None:
    def build(**given: Any) -> Any:
        given = {"preserve_initial_weight": True, "table_names": ["user"], **given}
        return make_module(OptimType.FTRL, [(1, 4)], **given)

    message = rf"\['user'\].*preserve_initial_weight=True with {threshold}=0.5"
    with pytest.raises(HyperparameterError, match=message):
        build(**{threshold: 0.5})
    module = build()
    with pytest.raises(HyperparameterError, match=message):
        module.update_hyper_parameters({threshold: 0.5})
    assert module.hyperparameters[threshold] == 0.0
    for scale in ("ftrl_beta", "initial_accumulator_value", "l2_reg"):
        build(**{threshold: 0.5, scale: 0.1})
    build(**{threshold: 0.5, "learning_rate_power": 0.0})  # every denominator is at least 1 / lr


@pytest.mark.parametrize(
    "given",
    [
        {"preserve_initial_weight": 1},
        {"multiply_linear_by_lr": "yes"},
        {"l2_shrinkage_reg": -1.0},
        {"l21_reg": math.nan},
    ],
    ids=str,
)
def test_bad_values_are_named(given) -> None:
    ((name, value),) = given.items()
    with pytest.raises(HyperparameterError, match=f"{name}={value!r} is not legal"):
        make_module(OptimType.FTRL, [(1, 4)], **given)
