"""FTRL of TensorFlow and Keras.

Keras' ``Ftrl``, ``tf.compat.v1.train.FtrlOptimizer`` and the ops ``ResourceSparseApplyFtrl`` and
``ResourceSparseApplyFtrlV2`` share one formula. It divides by ``accum^p / lr + 2 * l2``, ours by
``(ftrl_beta + accum^p) / learning_rate + l2_reg``. So ``l2_reg`` is twice their l2, and their beta,
which both optimizers add to l2 as ``beta / (2 * lr)``, is ``ftrl_beta``.
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

_NAMES = Names(
    "TensorFlow",
    {
        "learning_rate": ("learning_rate", 1.0),
        "learning_rate_power": ("learning_rate_power", 1.0),
        "initial_accumulator_value": ("initial_accumulator_value", 1.0),
        "l1_regularization_strength": ("l1_reg", 1.0),
        "l2_regularization_strength": ("l2_reg", 2.0),
        "l2_shrinkage_regularization_strength": ("l2_shrinkage_reg", 1.0),
        "beta": ("ftrl_beta", 1.0),
    },
)


def from_tensorflow(
    accumulator: Any,
    linear: Any,
    *,
    learning_rate: float = 0.001,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float = 0.0,
    multiply_linear_by_lr: bool = False,
) -> tuple[States, dict[str, Any]]:
    """Slots and arguments of Keras' ``Ftrl``, with its names and defaults.

    Args:
        accumulator: The slot "accumulator" ("accum" in TensorFlow 1), float ``[rows, D]``.
        linear: The slot "linear", float ``[rows, D]``.
        learning_rate: The present value where there is a schedule.
        learning_rate_power: Not above 0.
        initial_accumulator_value: Not negative.
        l1_regularization_strength: Not negative.
        l2_regularization_strength: Not negative; half of ``l2_reg``. For the ops, their ``l2``:
            a beta that was added to it stays there, which is the same while ``lr`` is constant.
        l2_shrinkage_regularization_strength: Not negative.
        beta: Not negative.
        multiply_linear_by_lr: The attribute of the ops; Keras leaves it at False.

    Returns:
        The states, float32 ``[rows, D]``, and every hyperparameter of ``OptimType.FTRL``.

    Raises:
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: Shapes differ, or a value is not legal.
    """
    hyperparameters = _NAMES.read(
        {
            "learning_rate": learning_rate,
            "learning_rate_power": learning_rate_power,
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
            "beta": beta,
        },
        multiply_linear_by_lr=multiply_linear_by_lr,
    )
    states = checked_states(linear, accumulator, ("linear", "accumulator"))
    return updated(states), hyperparameters


def to_tensorflow(
    states: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Slots and arguments for Keras' ``Ftrl``.

    Args:
        states: "linear" and "accum", float ``[rows, D]`` each. With ``multiply_linear_by_lr`` the
            slot "linear" is divided by the learning rate: the same while that is constant.
        hyperparameters: Of ``OptimType.FTRL``; the defaults for those left out.

    Returns:
        "accumulator" and "linear", float32 ``[rows, D]``, and the constructor's arguments.

    Raises:
        HyperparameterError: ``l21_reg`` is not 0, which TensorFlow does not have, or a value is not
            legal.
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: The states are not those of one table, or a row waits for
            ``preserve_initial_weight``.
    """
    arguments = _NAMES.write(hyperparameters)
    own = plain(checked_own(states, hyperparameters), hyperparameters)
    return {"accumulator": own["accum"], "linear": own["linear"]}, arguments


def to_tensorflow_op(
    states: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Variables and arguments for ``tf.raw_ops.ResourceSparseApplyFtrlV2``.

    Args:
        states: As for :func:`to_tensorflow`; ``multiply_linear_by_lr`` keeps its form here.
        hyperparameters: Of ``OptimType.FTRL``. The op has no beta: its ``l2`` is
            ``l2_reg / 2 + ftrl_beta / (2 * learning_rate)``, to be computed anew whenever the
            learning rate changes.

    Returns:
        "accum" and "linear", float32 ``[rows, D]``, and ``lr``, ``l1``, ``l2``, ``l2_shrinkage``,
        ``lr_power``, ``multiply_linear_by_lr``.

    Raises:
        HyperparameterError: As :func:`to_tensorflow`.
        TypeError: As :func:`to_tensorflow`.
        ValueError: As :func:`to_tensorflow`.
    """
    given = _NAMES.write(hyperparameters)
    own = checked_own(states, hyperparameters)
    folded = given["beta"] / (2.0 * given["learning_rate"])
    return {"accum": own["accum"], "linear": own["linear"]}, {
        "lr": given["learning_rate"],
        "l1": given["l1_regularization_strength"],
        "l2": given["l2_regularization_strength"] + folded,
        "l2_shrinkage": given["l2_shrinkage_regularization_strength"],
        "lr_power": given["learning_rate_power"],
        "multiply_linear_by_lr": FTRL.resolve(hyperparameters)["multiply_linear_by_lr"],
    }
