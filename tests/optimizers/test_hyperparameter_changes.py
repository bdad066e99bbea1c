"""``update_hyper_parameters``: every hyperparameter that updates read, changed in mid-training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.optimizers import spec_of

from .. import reference
from ..modules import HYPERPARAMETERS, fill, make_module, relative_error

ROWS, DIM = 6, 8
CHANGED: dict[str, Any] = {
    "learning_rate": 0.03,
    "momentum": 0.5,
    "dampening": 0.3,
    "nesterov": True,
    "weight_decay": 0.3,
    "weight_decay_mode": "L2",
    "eps": 0.05,
    "beta1": 0.6,
    "beta2": 0.9,
    "ftrl_beta": 0.5,
    "l1_reg": 0.02,
    "l2_reg": 0.2,
    "learning_rate_power": -0.7,
    "l2_shrinkage_reg": 0.1,
    "l21_reg": 0.02,
}
BASE = {**HYPERPARAMETERS, OptimType.EXACT_SGD: {"learning_rate": 0.1, "momentum": 0.9}}
DECAYING = {"weight_decay": 0.5, "weight_decay_mode": "DECOUPLE"}


def _base(optimizer: OptimType, name: str) -> dict[str, Any]:
    return {**BASE[optimizer], **(DECAYING if name == "weight_decay_mode" else {})}


CASES = [
    (optimizer, hyperparameter.name)
    for optimizer in OptimType
    for hyperparameter in spec_of(optimizer).hyperparameters
    if hyperparameter.in_kernel and not hyperparameter.fixed
]


def _train(optimizer: OptimType, name: str, change: dict[str, Any]) -> tuple[Any, Any]:
    """Two steps, a change and two more: ours, and in float64."""
    torch.manual_seed(0)
    spec, base = spec_of(optimizer), _base(optimizer, name)
    module = make_module(optimizer, [(ROWS, DIM)], **base)
    weights = torch.randn(ROWS, DIM)
    fill(module, [weights])
    expected, resolved = weights.double(), spec.resolve(base)
    states = [state.double() for state in module.split_optimizer_states()[0]]
    for step in range(1, 5):
        if step == 3:
            module.update_hyper_parameters(change)
            resolved = spec.resolve(change, base=resolved)
        gradient = torch.randn(ROWS, DIM)
        output = module(torch.arange(ROWS), torch.arange(ROWS + 1))
        output.backward(gradient)
        given = {key: resolved[key] for key in spec.kernel_hyperparameters}
        update = reference.UPDATES[optimizer.name]
        expected = update(expected, gradient.double(), states, step, **given)
    return module.split_embedding_weights()[0], expected


@pytest.mark.parametrize("optimizer, name", CASES, ids=lambda value: str(value))
def test_a_change_holds_from_the_next_update_on(optimizer, name) -> None:
    change = {name: CHANGED[name]}
    found, expected = _train(optimizer, name, change)
    assert relative_error(found, expected) <= 1e-5
    unchanged, _ = _train(optimizer, name, {})
    assert relative_error(unchanged, expected) > 1e-4
