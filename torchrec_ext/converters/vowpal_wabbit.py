"""FTRL of Vowpal Wabbit (``--ftrl``): the paper's formula, one weight per feature.

Its accumulators start at 0.
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
    "Vowpal Wabbit",
    {
        "ftrl_alpha": ("learning_rate", 1.0),
        "ftrl_beta": ("ftrl_beta", 1.0),
        "l1": ("l1_reg", 1.0),
        "l2": ("l2_reg", 1.0),
    },
)


def from_vowpal_wabbit(
    z: Any,
    g2: Any,
    *,
    ftrl_alpha: float = 0.005,
    ftrl_beta: float = 0.1,
    l1: float = 0.0,
    l2: float = 0.0,
) -> tuple[States, dict[str, Any]]:
    """States and options of ``vw --ftrl``, with its names and defaults.

    Args:
        z: The linear terms, float ``[rows]``: one feature per row, in the order of the table.
            Features that the model does not have are 0 here and in ``g2``.
        g2: The sums of squared gradients, float ``[rows]``.
        ftrl_alpha: The learning rate.
        ftrl_beta: Not negative.
        l1: Not negative.
        l2: Not negative; equal to ``l2_reg``.

    Returns:
        The states, float32 ``[rows, 1]``, and every hyperparameter of ``OptimType.FTRL``.

    Raises:
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: Shapes differ, or a value is not legal.
    """
    given = {"ftrl_alpha": ftrl_alpha, "ftrl_beta": ftrl_beta, "l1": l1, "l2": l2}
    hyperparameters = _NAMES.read(given)
    states = updated(checked_states(z, g2, ("z", "g2"), dims=1))
    return {name: state.unsqueeze(1) for name, state in states.items()}, hyperparameters


def to_vowpal_wabbit(
    states: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """States and options for ``vw --ftrl``.

    Args:
        states: "linear" and "accum", float ``[rows, 1]`` each; with ``multiply_linear_by_lr``, z is
            linear divided by the learning rate: the same while that is constant.
        hyperparameters: Of ``OptimType.FTRL``; the defaults for those left out.

    Returns:
        "z" and "g2", float32 ``[rows]``, and ``ftrl_alpha``, ``ftrl_beta``, ``l1``, ``l2``.

    Raises:
        HyperparameterError: ``l21_reg``, ``l2_shrinkage_reg``, ``initial_accumulator_value`` or
            ``learning_rate_power`` is not its default, which is all that Vowpal Wabbit has, or a
            value is not legal.
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: The states are not those of one table of dim 1, or a row waits for
            ``preserve_initial_weight``.
    """
    arguments = _NAMES.write(hyperparameters)
    own = plain(checked_own(states, hyperparameters), hyperparameters)
    if own["linear"].shape[1] != 1:
        raise ValueError(
            f"states['linear'] has the shape {list(own['linear'].shape)}, but Vowpal Wabbit has "
            "one weight per feature; give one column of a table at a time"
        )
    return {"z": own["linear"].squeeze(1), "g2": own["accum"].squeeze(1)}, arguments
