"""Optimizer classes: a table's own fused optimizer, or the same update on a plain parameter.

A class names the optimizer of a table that will be sharded::

    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec_ext.optim import FTRL, Adagrad

    tables = model.ebc.embedding_bags
    _apply_optimizer_in_backward(FTRL, tables["user"].parameters(), {"lr": 0.1, "l1_reg": 1e-3})
    _apply_optimizer_in_backward(Adagrad, tables["item"].parameters(), {"lr": 0.05})

TorchRec reads class and keywords from the parameter when it shards the module; the update then
runs inside the backward pass of the sharded lookup.

On any other parameter they are ordinary optimizers: ``FTRL(model.parameters(), lr=0.1)`` with
``step()``, ``zero_grad()`` and ``state_dict()``, which update with the same kernels and so the same
bits. For DENSE and DATA_PARALLEL tables they are what a fused optimizer cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizer_base import FusedOptimizer
from torchrec_ext.optimizers import HyperparameterError

__all__ = [
    "FTRL",
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "classes",
]


class FTRL(FusedOptimizer):
    """FTRL-Proximal, whose L1 term makes weights exactly zero.

    Takes ``lr``, ``ftrl_beta``, ``l1_reg``, ``l2_reg``, ``learning_rate_power``,
    ``initial_accumulator_value`` and the extensions ``preserve_initial_weight``,
    ``l2_shrinkage_reg``, ``multiply_linear_by_lr`` and ``l21_reg`` (see
    ``torchrec_ext.optimizers.ftrl``).
    """

    optim_type = OptimType.FTRL


class SGD(FusedOptimizer):
    """SGD: ``lr``, ``momentum``, ``dampening``, ``nesterov``, ``weight_decay``, ``sparse_mode``.

    Unlike torch.optim.SGD's, the weight decay is decoupled; without momentum the two are the same.
    """

    optim_type = OptimType.EXACT_SGD


class Adagrad(FusedOptimizer):
    """Adagrad with one accumulator per weight: ``lr``, ``eps``, ``initial_accumulator_value``."""

    optim_type = OptimType.EXACT_ADAGRAD


class RowWiseAdagrad(FusedOptimizer):
    """Adagrad with one accumulator per row.

    Takes ``lr``, ``eps``, ``weight_decay``, ``weight_decay_mode`` and
    ``initial_accumulator_value``.
    """

    optim_type = OptimType.EXACT_ROWWISE_ADAGRAD


class Adam(FusedOptimizer):
    """torch.optim.Adam's keywords and defaults: the weight decay is coupled (L2).

    Args:
        params: As in :class:`FusedOptimizer`.
        lr: The learning rate, 1e-3 by default.
        betas: ``beta1`` and ``beta2``.
        eps: Added to the root of the second moment.
        weight_decay: The L2 coefficient, added to the gradient before the moments.
        **hyperparameters: ``bias_correction`` and ``sparse_mode`` (see
            ``torchrec_ext.optimizers``), and torch's other keywords at torch's defaults.

    Raises:
        HyperparameterError: As :class:`FusedOptimizer`.
    """

    optim_type = OptimType.ADAM
    _weight_decay_mode: ClassVar[str] = "L2"
    _other_names: ClassVar[dict[str, str]] = {
        "beta1": "give betas",
        "beta2": "give betas",
        "weight_decay_mode": "Adam's is L2, AdamW's DECOUPLE",
    }

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **hyperparameters: Any,
    ) -> None:
        name = f"torchrec_ext.optim.{type(self).__name__}"
        for keyword, instead in self._other_names.items():
            if keyword in hyperparameters:
                raise HyperparameterError(f"{name} has no {keyword}; {instead}")
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise HyperparameterError(f"{name}: betas={betas!r} is not legal; give two numbers")
        hyperparameters.pop("fused", None)  # it always is
        if lr is None and "learning_rate" not in hyperparameters:
            lr = 1e-3
        super().__init__(
            params,
            lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            weight_decay_mode=self._weight_decay_mode,
            **hyperparameters,
        )


class AdamW(Adam):
    """torch.optim.AdamW's keywords and defaults: the weight decay is decoupled.

    As :class:`Adam`, but ``weight_decay`` shrinks the previous weight by ``lr * weight_decay``
    before the update, and is 0.01 by default.
    """

    _weight_decay_mode = "DECOUPLE"

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **hyperparameters: Any,
    ) -> None:
        """See :class:`Adam`."""
        super().__init__(params, lr, betas, eps, weight_decay, **hyperparameters)


class PartialRowWiseAdam(FusedOptimizer):
    """Adam with one second moment per row, by FBGEMM's names.

    Takes ``lr``, ``beta1``, ``beta2``, ``eps``, ``weight_decay`` and ``weight_decay_mode``.
    """

    optim_type = OptimType.PARTIAL_ROWWISE_ADAM


class LAMB(FusedOptimizer):
    """LAMB with one trust ratio per row.

    Takes ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay``.
    """

    optim_type = OptimType.LAMB


def classes() -> dict[OptimType, type[FusedOptimizer]]:
    """Every class of this module by the optimizer it stands for."""
    return {
        cls.optim_type: cls
        for cls in (FTRL, SGD, Adagrad, RowWiseAdagrad, AdamW, PartialRowWiseAdam, LAMB)
    }
