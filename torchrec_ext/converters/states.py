"""FTRL's states as converters take and give them: checks, and what other libraries do not have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import HyperparameterError, spec_of

#: Tensors by the names of ``OptimType.FTRL``: "linear" and "accum".
States = dict[str, Tensor]

FTRL = spec_of(OptimType.FTRL)
STATE_NAMES = ("linear", "accum")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of these the states are converted, or refused.
_IN_STATES = ("preserve_initial_weight", "multiply_linear_by_lr")


def float32(name: str, value: Any, dims: int = 2) -> Tensor:
    """A copy of an array as a float32 tensor on the CPU.

    Args:
        name: The argument, for errors.
        value: A numpy array or tensor of a float dtype.
        dims: The legal number of dimensions.

    Raises:
        TypeError: ``value`` is neither, or not of a float dtype.
        ValueError: It has other dimensions, or values that are not finite in float32.
    """
    try:
        with warnings.catch_warnings():
            # Arrays mapped from a file, say; the tensor is only read.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} is a {type(value).__name__}; give a numpy array or a tensor of floats"
        ) from error
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{name} has the dtype {tensor.dtype}; give one of {', '.join(map(str, _DTYPES))}"
        )
    if tensor.dim() != dims:
        legal = "[rows, D]; reshape(-1, 1) makes it of one value per row" if dims == 2 else "[rows]"
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; it must be {legal}")
    converted = tensor.detach().to("cpu", torch.float32, copy=True)
    if not bool(converted.isfinite().all()):
        raise ValueError(
            f"{name} has values that are NaN, infinite or too large for float32; repair the rows "
            "they are in before they are converted"
        )
    return converted


def checked_states(linear: Any, accum: Any, names: tuple[str, str], dims: int = 2) -> States:
    """States of another library, checked together.

    Args:
        linear: The paper's z.
        accum: The paper's n.
        names: What the caller's arguments are called, for errors.
        dims: As in :func:`float32`.

    Returns:
        float32 copies.

    Raises:
        TypeError: As :func:`float32`.
        ValueError: As :func:`float32`, the shapes differ, or an ``accum`` is negative.
    """
    z, n = float32(names[0], linear, dims), float32(names[1], accum, dims)
    if z.shape != n.shape:
        raise ValueError(
            f"{names[0]} has the shape {list(z.shape)}, {names[1]} {list(n.shape)}; give both of "
            "the same table"
        )
    if n.numel() and float(n.min()) < 0.0:
        raise ValueError(
            f"{names[1]} has the value {float(n.min())!r}, but sums of squares are never negative; "
            f"are {names[0]} and {names[1]} exchanged?"
        )
    return {"linear": z, "accum": n}


def updated(states: States) -> States:
    """The states with every row marked as updated: no linear is -0."""
    return {"linear": states["linear"] + 0.0, "accum": states["accum"]}


def checked_own(states: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> States:
    """States of ``OptimType.FTRL`` on their way to another library.

    Raises:
        TypeError: As :func:`float32`.
        ValueError: As :func:`named_states`, or there are rows that ``preserve_initial_weight`` has
            yet to give their ``linear``.
    """
    values = FTRL.resolve(hyperparameters)
    own = named_states(states)
    if values["preserve_initial_weight"] and bool(_is_new(own["linear"]).any()):
        rows = int(_is_new(own["linear"]).any(dim=1).sum())
        raise ValueError(
            f"preserve_initial_weight=True has no counterpart, and {rows} rows of "
            "states['linear'] were never updated and wait for it; give the states that "
            "seed_new_rows(weights, states, hyperparameters) returns"
        )
    return updated(own)


def named_states(states: Mapping[str, Any]) -> States:
    """Checked float32 copies of states that are given by our names.

    Raises:
        TypeError: As :func:`float32`.
        ValueError: As :func:`checked_states`, or a state is missing or unknown.
    """
    if set(states) != set(STATE_NAMES):
        raise ValueError(
            f"states has {sorted(states)}; give {list(STATE_NAMES)}, as get_optimizer_state() does"
        )
    names = ("states['linear']", "states['accum']")
    return checked_states(states["linear"], states["accum"], names)


def with_weights(weights: Any, states: Mapping[str, Any]) -> tuple[Tensor, States]:
    """Checked float32 copies of a table's weights and states, by our names.

    Raises:
        TypeError: As :func:`float32`.
        ValueError: As :func:`named_states`, or the weights are not of the same table.
    """
    found, own = float32("weights", weights), named_states(states)
    if found.shape != own["linear"].shape:
        raise ValueError(
            f"weights has the shape {list(found.shape)}, states['linear'] "
            f"{list(own['linear'].shape)}; give both of the same table"
        )
    return found, own


def plain(states: States, hyperparameters: Mapping[str, Any]) -> States:
    """The states without the factor of ``multiply_linear_by_lr``."""
    values = FTRL.resolve(hyperparameters)
    if not values["multiply_linear_by_lr"]:
        return states
    linear = states["linear"].double() / values["learning_rate"]
    return {"linear": linear.float(), "accum": states["accum"]}


def seed_new_rows(
    weights: Any, states: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> States:
    """Gives rows that were never updated the ``linear`` of their weights.

    With ``preserve_initial_weight=True`` a row gets it in its first update only. No other library
    does that: before its states leave, a table needs it for all rows.

    Args:
        weights: float ``[rows, D]``.
        states: "linear" and "accum", float ``[rows, D]`` each.
        hyperparameters: Of ``OptimType.FTRL``.

    Returns:
        float32 copies; rows that were updated are as they were.

    Raises:
        TypeError: As :func:`float32`.
        ValueError: Shapes differ, or a value or hyperparameter is not legal.
    """
    values = FTRL.resolve(hyperparameters)
    own_weights, own = with_weights(weights, states)
    if values["preserve_initial_weight"]:
        derived = torch.empty_like(own["linear"])
        assert FTRL.derive is not None
        given = {**values, "preserve_initial_weight": False}
        FTRL.derive(own_weights, [derived, own["accum"]], given)
        own["linear"] = torch.where(_is_new(own["linear"]), derived, own["linear"])
    return updated(own)


def _is_new(linear: Tensor) -> Tensor:
    return (linear == 0.0) & linear.signbit()


class Names:
    """A library's hyperparameters.

    Args:
        library: Its name, for errors.
        names: Its hyperparameters, each with ours and the factor from its value to ours.
    """

    def __init__(self, library: str, names: Mapping[str, tuple[str, float]]) -> None:
        """See the class."""
        self._library = library
        self._names = names

    def read(self, given: Mapping[str, Any], **ours: Any) -> dict[str, Any]:
        """The hyperparameters of ``OptimType.FTRL``, all of them.

        Args:
            given: The library's, by its names.
            **ours: Others, by ours.

        Raises:
            HyperparameterError: A value is not legal; the error has the library's name for it.
        """
        values = {}
        for name, value in given.items():
            own, factor = self._names[name]
            valid = FTRL.keywords[own].validate(value, name, OptimType.FTRL)
            values[own] = factor * float(valid)
        return FTRL.resolve({**values, **ours})

    def write(self, hyperparameters: Mapping[str, Any]) -> dict[str, float]:
        """The library's hyperparameters.

        Raises:
            HyperparameterError: A value is not legal, or the library cannot express it.
        """
        values = FTRL.resolve(hyperparameters)
        expressed = {own for own, _ in self._names.values()}
        for hyperparameter in FTRL.hyperparameters:
            name, value = hyperparameter.name, values[hyperparameter.name]
            if name in expressed or name in _IN_STATES or value == hyperparameter.default:
                continue
            raise HyperparameterError(
                f"FTRL: {name}={value!r} has no counterpart in {self._library}; training goes on "
                f"there only with {name}={hyperparameter.default!r}: leave it out of "
                "hyperparameters if that is meant"
            )
        return {there: values[own] / factor for there, (own, factor) in self._names.items()}
