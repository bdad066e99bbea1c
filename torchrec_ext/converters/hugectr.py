"""FTRL of NVIDIA HugeCTR.

Its formula is the paper's, with a square root and accumulators that start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchrec_ext.converters.states import (
    Names,
    States,
    checked_own,
    checked_states,
    plain,
    updated,
)

_NAMES = Names(
    "HugeCTR",
    {
        "lr": ("learning_rate", 1.0),
        "beta": ("ftrl_beta", 1.0),
        "lambda1": ("l1_reg", 1.0),
        "lambda2": ("l2_reg", 1.0),
    },
)


def from_hugectr(
    n: Any,
    z: Any,
    *,
    lr: float,
    beta: float = 0.0,
    lambda1: float = 0.0,
    lambda2: float = 0.0,
) -> tuple[States, dict[str, Any]]:
    """States and hyperparameters of HugeCTR's ``Optimizer_t.Ftrl``.

    Args:
        n: The sums of squared gradients ("Ftrl.n" of a saved model), float ``[rows, D]``, rows in
            the order of the table they are for.
        z: The linear terms ("Ftrl.z"), float ``[rows, D]``.
        lr: The solver's learning rate, the present one where it changes.
        beta: Not negative.
        lambda1: Not negative.
        lambda2: Not negative; equal to ``l2_reg``.

    Returns:
        The states, float32 ``[rows, D]``, and every hyperparameter of ``OptimType.FTRL``.

    Raises:
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: Shapes differ, or a value is not legal.
    """
    given = {"lr": lr, "beta": beta, "lambda1": lambda1, "lambda2": lambda2}
    hyperparameters = _NAMES.read(given)
    return updated(checked_states(z, n, ("z", "n"))), hyperparameters


def to_hugectr(
    states: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """States and hyperparameters for HugeCTR.

    Args:
        states: "linear" and "accum", float ``[rows, D]`` each; with ``multiply_linear_by_lr``, z is
            linear divided by the learning rate: the same while that is constant.
        hyperparameters: Of ``OptimType.FTRL``; the defaults for those left out.

    Returns:
        "n" and "z", float32 ``[rows, D]``, and ``lr``, ``beta``, ``lambda1``, ``lambda2``.

    Raises:
        HyperparameterError: ``l21_reg``, ``l2_shrinkage_reg``, ``initial_accumulator_value`` or
            ``learning_rate_power`` is not its default, which is all that HugeCTR has, or a value is
            not legal.
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: The states are not those of one table, or a row waits for
            ``preserve_initial_weight``.
    """
    arguments = _NAMES.write(hyperparameters)
    own = plain(checked_own(states, hyperparameters), hyperparameters)
    return {"n": own["accum"], "z": own["linear"]}, arguments
