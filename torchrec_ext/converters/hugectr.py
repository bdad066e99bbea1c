"""FTRL of NVIDIA HugeCTR.

Its formula is the paper's, but for the square root: it is of n + FLT_EPSILON, where n starts at 0.
As n only ever grows by squares, that is our formula with ``accum`` = n + FLT_EPSILON. Early
versions took the root of n itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchrec_ext.converters.states import (
    FTRL,
    Names,
    States,
    checked_own,
    checked_states,
    plain,
    updated,
)

#: What HugeCTR adds to n under the square root.
FLT_EPSILON = 2.0**-23

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
    epsilon: float = FLT_EPSILON,
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
        epsilon: Added to n under the square root; 0 in early versions of HugeCTR.

    Returns:
        The states, float32 ``[rows, D]``, and every hyperparameter of ``OptimType.FTRL``.
        ``accum`` is n + epsilon, and so ``initial_accumulator_value`` is epsilon.

    Raises:
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: Shapes differ, or a value is not legal.
    """
    given = {"lr": lr, "beta": beta, "lambda1": lambda1, "lambda2": lambda2}
    _check_epsilon(epsilon)
    hyperparameters = _NAMES.read(given, initial_accumulator_value=epsilon)
    states = updated(checked_states(z, n, ("z", "n")))
    states["accum"] = (states["accum"].double() + epsilon).float()
    return states, hyperparameters


def to_hugectr(
    states: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    epsilon: float = FLT_EPSILON,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """States and hyperparameters for HugeCTR.

    Args:
        states: "linear" and "accum", float ``[rows, D]`` each; with ``multiply_linear_by_lr``, z is
            linear divided by the learning rate: the same while that is constant.
        hyperparameters: Of ``OptimType.FTRL``; the defaults for those left out.
        epsilon: As for :func:`from_hugectr`.

    Returns:
        "n" and "z", float32 ``[rows, D]``, and ``lr``, ``beta``, ``lambda1``, ``lambda2``. n is
        ``accum`` - epsilon, and 0 where that is negative: nothing there is less than epsilon.

    Raises:
        HyperparameterError: ``l21_reg``, ``l2_shrinkage_reg`` or ``learning_rate_power`` is not its
            default, which is all that HugeCTR has, ``initial_accumulator_value`` is neither 0 nor
            epsilon, or a value is not legal.
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: The states are not those of one table, or a row waits for
            ``preserve_initial_weight``.
    """
    _check_epsilon(epsilon)
    values = FTRL.resolve(hyperparameters)
    starts_there = values["initial_accumulator_value"] == epsilon
    arguments = _NAMES.write(
        {**values, "initial_accumulator_value": 0.0} if starts_there else values
    )
    own = plain(checked_own(states, values), values)
    n = (own["accum"].double() - epsilon).clamp(min=0.0).float()
    return {"n": n, "z": own["linear"]}, arguments


def _check_epsilon(epsilon: Any) -> None:
    if epsilon not in (0.0, FLT_EPSILON):
        raise ValueError(
            f"epsilon={epsilon!r} is not legal; it must be FLT_EPSILON, 2**-23, or 0 for early "
            "versions of HugeCTR"
        )
