"""The optimizers' updates in float64 on whole rows, straight from the definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchrec_ext import OptimType

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], None]


def update_of(optimizer: OptimType, **hyperparameters: float) -> Update:
    """``update(weight, gradient, state)`` of an optimizer; states start at zero."""
    function = {
        OptimType.EXACT_SGD: _sgd,
        OptimType.EXACT_ADAGRAD: _adagrad,
        OptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
        OptimType.FTRL: _ftrl,
    }[optimizer]

    def update(
        weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> None:
        function(weight, gradient, state, **hyperparameters)

    return update


def by_column_shard(update: Update, width: int) -> Update:
    """The update of a table split into shards of some columns, each with states of its own.

    It is the same for every optimizer but a row-wise one, whose accumulator is then a mean over the
    columns of a shard.
    """

    def sharded(
        weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]
    ) -> None:
        pairs = zip(weight.split(width, 1), gradient.split(width, 1), strict=True)
        for shard, (columns, column_gradient) in enumerate(pairs):
            prefix = f"{shard}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            update(columns, column_gradient, own)
            state.update({prefix + name: value for name, value in own.items()})

    return sharded


def _sgd(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    learning_rate: float,
) -> None:
    weight -= learning_rate * gradient


def _adagrad(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    learning_rate: float,
    eps: float = 1e-8,
) -> None:
    state["sum"] = state.get("sum", torch.zeros_like(weight)) + gradient.square()
    weight -= learning_rate * gradient / (state["sum"].sqrt() + eps)


def _rowwise_adagrad(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    learning_rate: float,
    eps: float = 1e-8,
) -> None:
    before = state.get("sum", torch.zeros(len(weight), dtype=weight.dtype))
    state["sum"] = before + gradient.square().mean(1)
    weight -= learning_rate * gradient / (state["sum"].sqrt() + eps).unsqueeze(1)


def _ftrl(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    learning_rate: float,
    ftrl_beta: float = 0.0,
    l1_reg: float = 0.0,
    l2_reg: float = 0.0,
) -> None:
    accum = state.get("accum", torch.zeros_like(weight))
    state["accum"] = accum + gradient.square()
    sigma = (state["accum"].sqrt() - accum.sqrt()) / learning_rate
    linear = state.get("linear", torch.zeros_like(weight)) + gradient - sigma * weight
    state["linear"] = linear
    denominator = (ftrl_beta + state["accum"].sqrt()) / learning_rate + l2_reg
    weight.copy_((linear.sign() * l1_reg - linear) / denominator)
    weight[linear.abs() <= l1_reg] = 0.0
