"""FTRL of NVIDIA DynamicEmb, whose names for the hyperparameters are also ours.

A key's values are one row: its embedding, then ``linear``, then ``accum``, ``D`` columns each, in
the table's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.converters.states import (
    Names,
    States,
    checked_own,
    checked_states,
    float32,
    plain,
    updated,
    with_weights,
)

_NAMES = Names(
    "DynamicEmb",
    {
        "learning_rate": ("learning_rate", 1.0),
        "learning_rate_power": ("learning_rate_power", 1.0),
        "ftrl_beta": ("ftrl_beta", 1.0),
        "l1_reg": ("l1_reg", 1.0),
        "l2_reg": ("l2_reg", 1.0),
        "initial_accumulator_value": ("initial_accumulator_value", 1.0),
    },
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def from_dynamicemb(
    values: Any,
    *,
    learning_rate: float,
    learning_rate_power: float = -0.5,
    ftrl_beta: float = 0.0,
    l1_reg: float = 0.0,
    l2_reg: float = 0.0,
    initial_accumulator_value: float = 0.0,
) -> tuple[Tensor, States, dict[str, Any]]:
    """Weights, states and hyperparameters of a DynamicEmb table.

    Args:
        values: ``[embedding | linear | accum]``, float ``[rows, 3 * D]``, rows in the order of the
            table they are for. A dump has the embeddings and the states in files of their own: give
            them side by side.
        learning_rate: The present value where there is a schedule.
        learning_rate_power: Not above 0.
        ftrl_beta: Not negative.
        l1_reg: Not negative.
        l2_reg: Not negative.
        initial_accumulator_value: Not negative.

    Returns:
        The weights, float32 ``[rows, D]``, the states, likewise, and every hyperparameter of
        ``OptimType.FTRL``.

    Raises:
        TypeError: ``values`` is no numpy array or tensor of floats.
        ValueError: Its columns are not those of three parts, or a value is not legal.
    """
    given = {
        "learning_rate": learning_rate,
        "learning_rate_power": learning_rate_power,
        "ftrl_beta": ftrl_beta,
        "l1_reg": l1_reg,
        "l2_reg": l2_reg,
        "initial_accumulator_value": initial_accumulator_value,
    }
    hyperparameters = _NAMES.read(given)
    rows = float32("values", values)
    columns = rows.shape[1]
    if columns == 0 or columns % 3:
        raise ValueError(
            f"values has {columns} columns; it must have 3 * D, [embedding | linear | accum], "
            "without padding"
        )
    weights, linear, accum = rows.split(columns // 3, dim=1)
    states = checked_states(linear, accum, ("values' linear part", "values' accum part"))
    return weights.clone(), updated(states), hyperparameters


def to_dynamicemb(
    weights: Any,
    states: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, dict[str, float]]:
    """Rows and hyperparameters for a DynamicEmb table.

    Args:
        weights: float ``[rows, D]``.
        states: "linear" and "accum", float ``[rows, D]`` each; with ``multiply_linear_by_lr``,
            linear is divided by the learning rate: the same while that is constant.
        hyperparameters: Of ``OptimType.FTRL``; the defaults for those left out.
        dtype: The DynamicEmb table's: float32, float16 or bfloat16. It is also that of the states
            there, which lose what does not fit into it.

    Returns:
        ``[embedding | linear | accum]``, ``[rows, 3 * D]``, and the hyperparameters.

    Raises:
        HyperparameterError: ``l21_reg`` or ``l2_shrinkage_reg`` is not 0, which is all that
            DynamicEmb has, or a value is not legal.
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: Shapes differ, ``dtype`` is another, a value is too large for it, or a row waits
            for ``preserve_initial_weight``.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} is not legal; give one of {', '.join(map(str, _DTYPES))}")
    arguments = _NAMES.write(hyperparameters)
    own = plain(checked_own(states, hyperparameters), hyperparameters)
    embedding, _ = with_weights(weights, own)
    values = torch.cat([embedding, own["linear"], own["accum"]], dim=1).to(dtype)
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"dtype={dtype} cannot hold a weight or state of this table; use a DynamicEmb table of "
            "float32 or bfloat16"
        )
    return values, arguments
