"""One optimizer step on a plain parameter, by the kernels that update tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrec_ext import cuda, ops
from torchrec_ext.optimizers import HyperparameterError, OptimizerSpec, State, spec_of

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: The key of a parameter's completed updates among its states, as in torch.optim.
STEP = "step"


def initial_states(
    spec: OptimizerSpec, parameter: Tensor, hyperparameters: Mapping[str, Any]
) -> dict[str, Tensor]:
    """A parameter's states before its first update: float32, of its shape or one value a row.

    Args:
        spec: The optimizer's.
        parameter: ``[rows, ...]``; a parameter of one dimension is one row.
        hyperparameters: All of them.
    """
    states: dict[str, Tensor] = {STEP: torch.zeros((), dtype=torch.int64)}
    for state in spec.states_for(hyperparameters):
        value = spec.initial_value(state, hyperparameters)
        states[state.name] = torch.full(
            _state_shape(state, parameter), value, dtype=state.dtype, device=parameter.device
        )
    return states


@torch.no_grad()
def update_parameter(
    spec: OptimizerSpec,
    parameter: Tensor,
    gradient: Tensor,
    states: Mapping[str, Tensor],
    hyperparameters: Mapping[str, Any],
) -> None:
    """Updates a parameter and its states in place.

    Args:
        spec: The optimizer's.
        parameter: float32, float16 or bfloat16.
        gradient: Dense, of its shape: every row is updated. Or sparse, with rows for indices: only
            these are.
        states: As :func:`initial_states` makes them.
        hyperparameters: All of them. :func:`check_update` has been called with all these.
    """
    rows, dim = _shape(parameter)
    touched = torch.arange(rows, device=parameter.device)
    if gradient.is_sparse:
        coalesced = gradient.coalesce()
        touched, gradient = coalesced.indices()[0], coalesced.values()
    own_states = [states[state.name] for state in spec.states_for(hyperparameters)]
    layout = torch.tensor([[rows, dim, 0, *(0 for _ in own_states)]])
    weights = parameter.detach().contiguous()
    if touched.numel() > 0 and dim > 0:
        ops.fused_update(
            gradient.reshape(touched.numel(), dim).to(torch.float32).contiguous(),
            weights.view(-1),
            [state.view(-1) for state in own_states],
            layout,
            torch.zeros(1, dtype=torch.int64),
            touched,
            torch.arange(touched.numel() + 1, device=parameter.device),
            None,
            pooling_mode=ops.POOLING_NONE,
            optimizer=spec.optimizer,
            hyperparameters=spec.kernel_values(hyperparameters),
            step=int(states[STEP]),
        )
    if weights.data_ptr() != parameter.data_ptr():
        parameter.copy_(weights)
    else:  # the op writes behind autograd's back
        torch.autograd.graph.increment_version(parameter)
    states[STEP].add_(1)


def check_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks a state dict against the parameters that it is to be loaded for.

    Raises:
        ValueError: The states of a parameter have other names, shapes or dtypes.
    """
    own = [each for group in optimizer.param_groups for each in group["params"]]
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    spec, name = spec_of(optimizer.optim_type), type(optimizer).__name__  # type: ignore[attr-defined]
    for place, (parameter, number) in enumerate(zip(own, saved, strict=False)):
        found = state_dict["state"].get(number)
        if not found:
            continue
        group = next(g for g in state_dict["param_groups"] if number in g["params"])
        expected = _shapes(spec, parameter, group)
        shapes = {
            state: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            for state, value in found.items()
        }
        if shapes != expected:
            raise ValueError(
                f"{name}: the states of parameter {place}, of shape {tuple(parameter.shape)}, are "
                f"{shapes} in the state dict, expected {expected}"
            )
        for state, value in found.items():
            if state != STEP and value.dtype != torch.float32:
                raise ValueError(
                    f"{name}: {state} of parameter {place} has dtype {value.dtype} in the state "
                    "dict, expected torch.float32"
                )
    for group in state_dict["param_groups"]:
        missing = sorted(optimizer.defaults.keys() - group.keys())
        if missing:
            raise ValueError(
                f"{name}: a parameter group of the state dict has no {', '.join(missing)}; it is "
                "of another optimizer"
            )
        mode, own_mode = (each.get("weight_decay_mode") for each in (group, optimizer.defaults))
        if mode != own_mode:
            raise ValueError(
                f"{name}: the state dict's weight decay is {mode}, this class's {own_mode}; load "
                "it with the class that wrote it"
            )


def _shapes(
    spec: OptimizerSpec, parameter: Tensor, group: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    states = spec.states_for({**spec.resolve({"lr": 1.0}), **group})
    return {STEP: (), **{state.name: _state_shape(state, parameter) for state in states}}


def _state_shape(state: State, parameter: Tensor) -> tuple[int, ...]:
    return (_shape(parameter)[0],) if state.rowwise else tuple(parameter.shape)


def _shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns: all dimensions behind the first are one row's columns."""
    if parameter.dim() < 2:
        return 1, parameter.numel()
    return parameter.shape[0], parameter.numel() // max(parameter.shape[0], 1)


def check_update(
    spec: OptimizerSpec,
    parameter: Tensor,
    gradient: Tensor,
    states: Mapping[str, Tensor],
    hyperparameters: Mapping[str, Any],
) -> None:
    """Checks the arguments of :func:`update_parameter`; ``states`` is empty before the first.

    Raises:
        ValueError: The parameter's dtype or shape, the gradient's layout or a hyperparameter that
            needs other states is not supported.
    """
    shape = tuple(parameter.shape)
    needed = [state.name for state in spec.states_for(hyperparameters)]
    if states and not states.keys() >= set(needed):
        raise ValueError(
            f"a parameter of shape {shape} has the states {sorted(states)}, but its group's "
            f"hyperparameters now need {needed}; set them before the first step"
        )
    _, dim = _shape(parameter)
    if parameter.is_cuda and dim > cuda.MAX_DIM:
        raise ValueError(
            f"a parameter of shape {shape} has rows of {dim} elements; on CUDA they have at most "
            f"{cuda.MAX_DIM}"
        )
    if parameter.dtype not in _WEIGHT_DTYPES:
        raise ValueError(
            f"a parameter of shape {shape} has dtype {parameter.dtype}; the kernels update "
            "float32, float16 and bfloat16"
        )
    if not gradient.is_sparse:
        return
    if gradient.sparse_dim() != 1 or parameter.dim() < 2:
        raise ValueError(
            f"the gradient of a parameter of shape {shape} is sparse in {gradient.sparse_dim()} "
            "dimensions; only rows may be: the first of at least two"
        )
    if hyperparameters.get("sparse_mode") == "dense":
        raise ValueError(
            f"sparse_mode='dense' with a sparse gradient of a parameter of shape {shape}: rows "
            "without a gradient would have to move; use sparse=False or sparse_mode='lazy'"
        )


def check_meaning(
    spec: OptimizerSpec,
    parameter: Tensor,
    meaning: Mapping[str, Any] | None,
    hyperparameters: Mapping[str, Any],
) -> None:
    """Checks that a parameter's states still mean what its group's hyperparameters say.

    Args:
        spec: The optimizer's.
        parameter: Whose states.
        meaning: What :meth:`OptimizerSpec.meaning_of_states` gave at its last update; None: it has
            no states.
        hyperparameters: All of them.

    Raises:
        HyperparameterError: One is another now.
    """
    for name, value in (meaning or {}).items():
        if hyperparameters[name] != value:
            raise HyperparameterError(
                f"{spec.optimizer.name}: {name}={hyperparameters[name]!r} cannot replace {value!r} "
                f"for a parameter of shape {tuple(parameter.shape)} that was already updated; set "
                "it before the first step"
            )
