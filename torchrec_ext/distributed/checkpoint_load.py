"""Loads states of ours from a state dict: in any form, and either all of them or none.

Weights that come without them are noted, for what :mod:`torchrec_ext.loaded_weights` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.checkpoint_checks import (
    check_others,
    check_states,
    parameters_of_ours,
)
from torchrec_ext.distributed.description import described_optimizer
from torchrec_ext.distributed.fused_optimizer import are_states_hidden, check_steps
from torchrec_ext.distributed.patching import Function, Seam


def load(
    original: Callable[..., Any], optimizer: KeyedOptimizer, state_dict: Mapping[str, Any]
) -> Any:
    """``KeyedOptimizer.load_state_dict`` with checks, and from another plan's form of states.

    Args:
        original: TorchRec's.
        optimizer: The one that loads.
        state_dict: In any form that :mod:`torchrec_ext.distributed.saved_form` knows.

    Raises:
        ValueError: See ``check_steps``, ``check_states`` and ``check_others``; nothing was changed.
    """
    check_steps(optimizer, state_dict)
    check_states(optimizer, state_dict)
    given = dict(state_dict.get("state", {}))
    tables = list(parameters_of_ours(optimizer))
    rowwise: list[Callable[[], None]] = []
    for part, weight, key in () if are_states_hidden() else tables:
        table, saved = part.saved_tables[weight], given[key]
        names = [] if part.is_dtensor else table.rowwise
        # What TorchRec would copy one to one: these are written below, or no part of the module.
        own = {k: v for k, v in part.state[weight].items() if k not in saved or k in names}
        given[key] = {**saved, **own}
        for name in names:
            rowwise.append(functools.partial(table.write_rowwise, name, saved[name]))
    for key in optimizer.params.keys() & given.keys() - {key for _, _, key in tables}:
        given[key] = _without_description(key, given[key])
    complete = {**state_dict, "state": given}
    check_others(optimizer, complete)
    result = original(optimizer, complete)
    with torch.no_grad():
        for write in rowwise:
            write()
    return result


def _without_description(key: str, states: Any) -> Any:
    """States for an optimizer that is not ours: FBGEMM's optimizer of the same name can have them.

    Raises:
        ValueError: FBGEMM has no such optimizer.
    """
    if not isinstance(states, Mapping):
        return states
    described = {name: described_optimizer(name.rpartition(".")[2]) for name in states}
    for optimizer in described.values():
        if optimizer is not None and optimizer.counterpart is None:
            raise ValueError(
                f"{key}: the states were written with OptimType.{optimizer.name}, and the table's "
                "optimizer is not of torchrec_ext; give it fused_params with that one"
            )
    return {name: value for name, value in states.items() if described[name] is None}


def _checked_load(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        return load(original, self, state_dict)

    return load_state_dict


def _noted_load(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, prefix: str = "", strict: bool = True) -> Any:
        result = original(self, state_dict, prefix, strict)
        for part, weight, key in parameters_of_ours(self.fused_optimizer):
            if f"{prefix}{key}" in state_dict:
                part.module.loaded_weights.weights_loaded([part.saved_tables[weight].name])
        return result

    return load_state_dict


SEAMS = (
    Seam(KeyedOptimizer, "load_state_dict", ("self", "state_dict"), _checked_load),
    Seam(
        DistributedModelParallel,
        "load_state_dict",
        ("self", "state_dict", "prefix", "strict"),
        _noted_load,
    ),
)
