"""The optimizers' updates in float64 on the touched rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchrec_ext import OptimType
from torchrec_ext.optimizers import spec_of

from .. import reference

#: ``update(weight, gradient, state, step)`` in place; states start at zero.
Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int], None]


def update_of(optimizer: OptimType, **hyperparameters: Any) -> Update:
    """The update of an optimizer, with the spec's defaults."""
    spec = spec_of(optimizer)
    resolved = spec.resolve(hyperparameters)
    states = spec.states_for(resolved)
    given = {name: resolved[name] for name in spec.kernel_hyperparameters}

    def update(
        weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
    ) -> None:
        values = [
            state.get(s.name, torch.zeros_like(weight[:, 0] if s.rowwise else weight))
            for s in states
        ]
        weight.copy_(reference.UPDATES[optimizer.name](weight, gradient, values, step, **given))
        state.update({s.name: value for s, value in zip(states, values, strict=True)})

    return update


def by_column_shard(update: Update, width: int) -> Update:
    """The update of a table split into shards of some columns, each with states of its own.

    It is the same for every optimizer that looks at one column only; sums and means over a row are
    then over the columns of a shard.
    """

    def sharded(
        weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
    ) -> None:
        pairs = zip(weight.split(width, 1), gradient.split(width, 1), strict=True)
        for shard, (columns, column_gradient) in enumerate(pairs):
            prefix = f"{shard}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            update(columns, column_gradient, own, step)
            state.update({prefix + name: value for name, value in own.items()})

    return sharded
