"""FTRL of other libraries in float64 numpy, each by its own formula, names and layout.

Nothing of the package is used here but the converters at the ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchrec_ext import converters

Arrays = dict[str, np.ndarray]
#: Weights, states and hyperparameters as the converters give and take them.
Ours = tuple[Any, dict[str, torch.Tensor], dict[str, Any]]


def float64(**arrays: Any) -> Arrays:
    """Copies."""
    return {name: np.asarray(value).astype(np.float64) for name, value in arrays.items()}


def tensorflow_step(state: Arrays, rows: np.ndarray, g: np.ndarray, given: Mapping) -> None:
    """Core kernel ``training_ops.cc``; l2 as Keras' ``ftrl.py`` hands it over."""
    lr, power = given["learning_rate"], given["learning_rate_power"]
    l1 = given["l1_regularization_strength"]
    l2 = given["l2_regularization_strength"] + given["beta"] / (2 * lr)
    shrinkage = given["l2_shrinkage_regularization_strength"]
    w, n, z = (state[name][rows] for name in ("var", "accumulator", "linear"))
    shrunk_gradient = g + 2 * shrinkage * w
    new = n + g**2
    if given.get("multiply_linear_by_lr", False):
        z = z + shrunk_gradient * lr - (new**-power - n**-power) * w
        quadratic = new**-power + 2 * l2 * lr
        w = (np.clip(z, -l1 * lr, l1 * lr) - z) / quadratic
    else:
        z = z + shrunk_gradient - (new**-power - n**-power) / lr * w
        quadratic = new**-power / lr + 2 * l2
        w = (np.clip(z, -l1, l1) - z) / quadratic
    state["var"][rows], state["accumulator"][rows], state["linear"][rows] = w, new, z


def hugectr_step(state: Arrays, rows: np.ndarray, g: np.ndarray, given: Mapping) -> None:
    """``ragged_static_embedding.cu``: beta goes to lambda2 as beta / lr."""
    epsilon = given["epsilon"]
    lr, lambda2 = given["lr"], given["lambda2"] + given["beta"] / given["lr"]
    w, n, z = (state[name][rows] for name in ("weight", "n", "z"))
    new = n + g * g
    z = z + g - (np.sqrt(new + epsilon) - np.sqrt(n + epsilon)) / lr * w
    x = given["lambda1"] * (1 - 2 * np.signbit(z)) - z
    y = np.sqrt(new + epsilon) / lr + lambda2
    w = x / y * (given["lambda1"] < np.abs(z))
    state["weight"][rows], state["n"][rows], state["z"][rows] = w, new, z


def vowpal_wabbit_step(state: Arrays, rows: np.ndarray, g: np.ndarray, given: Mapping) -> None:
    """``ftrl.cc``, proximal update."""
    w, z, g2 = (state[name][rows] for name in ("w", "z", "g2"))
    new = g2 + g * g
    z = z + g - (np.sqrt(new) - np.sqrt(g2)) / given["ftrl_alpha"] * w
    flag = np.sign(z)
    step = 1 / (given["l2"] + (given["ftrl_beta"] + np.sqrt(new)) / given["ftrl_alpha"])
    w = np.where(np.abs(z) <= given["l1"], 0.0, step * flag * (given["l1"] - np.abs(z)))
    state["w"][rows], state["z"][rows], state["g2"][rows] = w, z, new


def dynamicemb_step(state: Arrays, rows: np.ndarray, g: np.ndarray, given: Mapping) -> None:
    """``optimizer_kernel.cuh``, on rows ``[embedding | linear | accum]``."""
    dim = g.shape[1]
    values = state["values"][rows]
    w, linear, accum = values[:, :dim], values[:, dim : 2 * dim], values[:, 2 * dim :]
    lr, power = given["learning_rate"], -given["learning_rate_power"]
    new = accum + g * g
    linear = linear + g - (new**power - accum**power) / lr * w
    quadratic = (given["ftrl_beta"] + new**power) / lr + given["l2_reg"]
    solved = (given["l1_reg"] * np.sign(linear) - linear) / quadratic
    w = np.where(np.abs(linear) > given["l1_reg"], solved, 0.0)
    state["values"][rows] = np.concatenate([w, linear, new], axis=1)


@dataclasses.dataclass(frozen=True)
class Library:
    """A library: fresh state from weights, one step, its weights, and the ways to and from ours."""

    start: Callable[[np.ndarray, Mapping], Arrays]
    step: Callable[[Arrays, np.ndarray, np.ndarray, Mapping], None]
    weights: Callable[[Arrays], np.ndarray]
    to_ours: Callable[[Arrays, Mapping], Ours]
    from_ours: Callable[[Any, Any, Any], tuple[Arrays, dict[str, Any]]]


def _tensorflow_start(weights: np.ndarray, given: Mapping) -> Arrays:
    accumulator = np.full_like(weights, given["initial_accumulator_value"])
    return float64(var=weights, accumulator=accumulator, linear=np.zeros_like(weights))


def _tensorflow_to_ours(state: Arrays, given: Mapping) -> Ours:
    converted = converters.from_tensorflow(state["accumulator"], state["linear"], **given)
    return state["var"], *converted


def _tensorflow_from_ours(weights: Any, states: Any, ours: Any) -> tuple[Arrays, dict[str, Any]]:
    slots, given = converters.to_tensorflow(states, ours)
    return float64(var=weights, **slots), given


def _zeros(*names: str) -> Callable[[np.ndarray, Mapping], Arrays]:
    """A weight under the first name, zeros under the others."""

    def start(weights: np.ndarray, given: Mapping) -> Arrays:
        return float64(**{names[0]: weights}, **{n: np.zeros_like(weights) for n in names[1:]})

    return start


def _hugectr_to_ours(state: Arrays, given: Mapping) -> Ours:
    return state["weight"], *converters.from_hugectr(state["n"], state["z"], **given)


def _hugectr_from_ours(weights: Any, states: Any, ours: Any) -> tuple[Arrays, dict[str, Any]]:
    epsilon = ours["initial_accumulator_value"]
    found, given = converters.to_hugectr(states, ours, epsilon)
    return float64(weight=weights, **found), {**given, "epsilon": epsilon}


def _vowpal_wabbit_to_ours(state: Arrays, given: Mapping) -> Ours:
    """A model of one weight per feature for every column of the table."""
    columns = zip(state["z"].T, state["g2"].T, strict=True)
    parts = [converters.from_vowpal_wabbit(z, g2, **given) for z, g2 in columns]
    states = {name: torch.cat([s[name] for s, _ in parts], dim=1) for name in ("linear", "accum")}
    return state["w"], states, parts[0][1]


def _vowpal_wabbit_from_ours(weights: Any, states: Any, ours: Any) -> tuple[Arrays, dict[str, Any]]:
    columns = [
        converters.to_vowpal_wabbit({k: s[:, [column]] for k, s in states.items()}, ours)
        for column in range(weights.shape[1])
    ]
    found = {name: torch.stack([s[name] for s, _ in columns], dim=1) for name in ("z", "g2")}
    return float64(w=weights, **found), columns[0][1]


def _dynamicemb_start(weights: np.ndarray, given: Mapping) -> Arrays:
    accum = np.full_like(weights, given["initial_accumulator_value"])
    return float64(values=np.concatenate([weights, np.zeros_like(weights), accum], axis=1))


def _dynamicemb_from_ours(weights: Any, states: Any, ours: Any) -> tuple[Arrays, dict[str, Any]]:
    values, given = converters.to_dynamicemb(weights, states, ours)
    return float64(values=values), given


LIBRARIES = {
    "tensorflow": Library(
        _tensorflow_start,
        tensorflow_step,
        lambda state: state["var"],
        _tensorflow_to_ours,
        _tensorflow_from_ours,
    ),
    "hugectr": Library(
        _zeros("weight", "n", "z"),
        hugectr_step,
        lambda state: state["weight"],
        _hugectr_to_ours,
        _hugectr_from_ours,
    ),
    "vowpal_wabbit": Library(
        _zeros("w", "z", "g2"),
        vowpal_wabbit_step,
        lambda state: state["w"],
        _vowpal_wabbit_to_ours,
        _vowpal_wabbit_from_ours,
    ),
    "dynamicemb": Library(
        _dynamicemb_start,
        dynamicemb_step,
        lambda state: state["values"][:, : state["values"].shape[1] // 3],
        lambda state, given: converters.from_dynamicemb(state["values"], **given),
        _dynamicemb_from_ours,
    ),
}

_TENSORFLOW = {
    "learning_rate": 0.1,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
}
_HUGECTR = {"lr": 0.1, "beta": 0.0, "lambda1": 0.0, "lambda2": 0.0, "epsilon": 2.0**-23}
_DYNAMICEMB = {
    "learning_rate": 0.1,
    "learning_rate_power": -0.5,
    "ftrl_beta": 1.0,
    "l1_reg": 0.05,
    "l2_reg": 0.3,
    "initial_accumulator_value": 0.0,
}

#: Hyperparameters of each library, by its names.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensorflow": ("tensorflow", _TENSORFLOW),
    "tensorflow-l1": ("tensorflow", {**_TENSORFLOW, "l1_regularization_strength": 0.2}),
    "tensorflow-l2": ("tensorflow", {**_TENSORFLOW, "l2_regularization_strength": 2.0}),
    "tensorflow-beta": ("tensorflow", {**_TENSORFLOW, "beta": 1.0}),
    "tensorflow-shrinkage": (
        "tensorflow",
        {**_TENSORFLOW, "l2_shrinkage_regularization_strength": 0.3},
    ),
    "tensorflow-power": ("tensorflow", {**_TENSORFLOW, "learning_rate_power": -0.7}),
    "tensorflow-constant-rate": ("tensorflow", {**_TENSORFLOW, "learning_rate_power": 0.0}),
    "tensorflow-everything": (
        "tensorflow",
        {
            "learning_rate": 0.05,
            "learning_rate_power": -0.6,
            "initial_accumulator_value": 0.2,
            "l1_regularization_strength": 0.05,
            "l2_regularization_strength": 0.7,
            "l2_shrinkage_regularization_strength": 0.1,
            "beta": 0.5,
        },
    ),
    "hugectr": ("hugectr", {**_HUGECTR, "beta": 1.0, "lambda1": 0.1, "lambda2": 0.4}),
    "hugectr-no-beta": ("hugectr", _HUGECTR),
    "hugectr-early": ("hugectr", {**_HUGECTR, "lambda2": 0.4, "epsilon": 0.0}),
    "vowpal_wabbit": (
        "vowpal_wabbit",
        {"ftrl_alpha": 0.005, "ftrl_beta": 0.1, "l1": 0.0, "l2": 0.0},
    ),
    "vowpal_wabbit-l1-l2": (
        "vowpal_wabbit",
        {"ftrl_alpha": 0.1, "ftrl_beta": 1.0, "l1": 0.1, "l2": 3.0},
    ),
    "dynamicemb": ("dynamicemb", _DYNAMICEMB),
    "dynamicemb-power": (
        "dynamicemb",
        {**_DYNAMICEMB, "learning_rate_power": -0.8, "initial_accumulator_value": 0.5},
    ),
}
