"""Optimizer classes that give one table its own fused optimizer.

They are names for ``apply_optimizer_in_backward``, not optimizers to call ``step()`` on::

    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec_ext.optim import FTRL, Adagrad

    tables = model.ebc.embedding_bags
    _apply_optimizer_in_backward(FTRL, tables["user"].parameters(), {"lr": 0.1, "l1_reg": 1e-3})
    _apply_optimizer_in_backward(Adagrad, tables["item"].parameters(), {"lr": 0.05})

TorchRec reads class and keywords from the parameter when it shards the module; the update then
runs inside the backward pass of the sharded lookup.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import HyperparameterError, spec_of

__all__ = ["FTRL", "SGD", "Adagrad", "FusedOptimizer", "RowWiseAdagrad", "classes"]


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the classes below: the checked hyperparameters of a table's fused optimizer.

    The keywords are copied and checked here, once per parameter, because TorchRec writes into the
    keyword dict it was given: two tables that share one dict would otherwise share the optimizer
    that was applied first.

    Args:
        params: The table's parameter, as ``apply_optimizer_in_backward`` passes it.
        lr: The learning rate under torch's name; ``learning_rate`` is accepted as well.
        **hyperparameters: The optimizer's other hyperparameters, by the names that
            ``fused_params`` takes (see ``torchrec_ext.optimizers``).

    Raises:
        HyperparameterError: A name that this optimizer does not have, a value out of range, or a
            learning rate given under both names.
    """

    optim_type: ClassVar[OptimType]

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float | None = None,
        **hyperparameters: Any,
    ) -> None:
        from torchrec_ext import install

        if lr is not None:
            hyperparameters["lr"] = lr
        if "optimizer" in hyperparameters:
            raise HyperparameterError(
                f"{type(self).__name__} got optimizer={hyperparameters['optimizer']!r}: the class "
                "already names the optimizer. TorchRec adds this key to a dict that it sharded a "
                "table with; pass a fresh dict"
            )
        defaults = spec_of(self.optim_type).resolve(hyperparameters)
        defaults["lr"] = defaults.pop("learning_rate")
        super().__init__(params, defaults)
        # A class of ours means nothing to TorchRec's stock sharders without the hook.
        install()

    def fused_params(self) -> dict[str, Any]:
        """The ``fused_params`` entries of this optimizer: its type and every hyperparameter."""
        group = self.param_groups[0]
        names = [hyperparameter.name for hyperparameter in spec_of(self.optim_type).hyperparameters]
        values = {name: group["lr" if name == "learning_rate" else name] for name in names}
        return {"optimizer": self.optim_type, **spec_of(self.optim_type).resolve(values)}

    def step(self, closure: Any = None) -> NoReturn:
        """Refuses: the update is fused into the backward pass of a sharded table.

        Raises:
            NotImplementedError: Always.
        """
        name = type(self).__name__
        raise NotImplementedError(
            f"torchrec_ext.optim.{name} does not step a dense parameter. It marks an embedding "
            f"table: call _apply_optimizer_in_backward({name}, table.parameters(), {{...}}) and "
            "shard the module that holds the table with DistributedModelParallel; for a dense "
            "parameter use an optimizer of torch.optim"
        )


class FTRL(FusedOptimizer):
    """FTRL-Proximal, whose L1 term makes weights exactly zero.

    Takes ``lr``, ``ftrl_beta``, ``l1_reg``, ``l2_reg``, ``learning_rate_power`` and
    ``initial_accumulator_value``.
    """

    optim_type = OptimType.FTRL


class SGD(FusedOptimizer):
    """Plain SGD: ``lr``."""

    optim_type = OptimType.EXACT_SGD


class Adagrad(FusedOptimizer):
    """Adagrad with one accumulator per weight: ``lr``, ``eps``, ``initial_accumulator_value``."""

    optim_type = OptimType.EXACT_ADAGRAD


class RowWiseAdagrad(FusedOptimizer):
    """Adagrad with one accumulator per row: ``lr``, ``eps``, ``initial_accumulator_value``."""

    optim_type = OptimType.EXACT_ROWWISE_ADAGRAD


def classes() -> dict[OptimType, type[FusedOptimizer]]:
    """Every class of this module by the optimizer it stands for."""
    return {cls.optim_type: cls for cls in (FTRL, SGD, Adagrad, RowWiseAdagrad)}
