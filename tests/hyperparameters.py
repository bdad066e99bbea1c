"""Hyperparameters for the tests of every optimizer. Imports neither FBGEMM nor TorchRec."""

from __future__ import annotations

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


def kernel_values(optimizer: OptimType, **hyperparameters: Any) -> list[float]:
    """Hyperparameters as the op takes them."""
    spec = spec_of(optimizer)
    return spec.kernel_values(spec.resolve(hyperparameters))
