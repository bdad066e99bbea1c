"""Hyperparameters for the tests of every optimizer. Imports neither FBGEMM nor TorchRec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec_ext import OptimType
from torchrec_ext.optimizers import spec_of

HYPERPARAMETERS: dict[OptimType, dict[str, Any]] = {
    OptimType.EXACT_SGD: {"learning_rate": 0.1},
    OptimType.EXACT_ADAGRAD: {"learning_rate": 0.1, "eps": 1e-6},
    OptimType.EXACT_ROWWISE_ADAGRAD: {"learning_rate": 0.1, "eps": 1e-6},
    OptimType.FTRL: {"learning_rate": 0.1, "ftrl_beta": 1.0, "l1_reg": 0.1, "l2_reg": 0.01},
    OptimType.ADAM: {"learning_rate": 0.1, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.5},
    OptimType.PARTIAL_ROWWISE_ADAM: {"learning_rate": 0.1, "eps": 1e-6, "weight_decay": 0.5},
    OptimType.LAMB: {"learning_rate": 0.1, "eps": 1e-6, "weight_decay": 0.5},
}

#: The optimizers by name, and FTRL with its extensions.
CASES: dict[str, tuple[OptimType, dict[str, Any]]] = {
    optimizer.name: (optimizer, given) for optimizer, given in HYPERPARAMETERS.items()
}
_FTRL = HYPERPARAMETERS[OptimType.FTRL]
_EXTENDED = {
    "preserve_initial_weight": True,
    "l2_shrinkage_reg": 0.05,
    "multiply_linear_by_lr": True,
    "initial_accumulator_value": 0.1,
}
CASES["FTRL-extended"] = (OptimType.FTRL, {**_FTRL, **_EXTENDED})
CASES["FTRL-group-lasso"] = (OptimType.FTRL, {**_FTRL, "l21_reg": 0.1})
CASES["FTRL-everything"] = (
    OptimType.FTRL,
    {**_FTRL, **_EXTENDED, "l21_reg": 0.1, "learning_rate_power": -0.7},
)


def of_update(given: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that an update reads; the others choose initial states."""
    return {name: value for name, value in given.items() if name != "initial_accumulator_value"}


def kernel_values(optimizer: OptimType, **hyperparameters: Any) -> list[float]:
    """Hyperparameters as the op takes them."""
    spec = spec_of(optimizer)
    return spec.kernel_values(spec.resolve(hyperparameters))
