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


#: Keywords of torch.optim's classes that have no counterpart here.
_TORCH_KEYWORDS = frozenset(
    (
        "amsgrad",
        "capturable",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "lr_decay",
        "maximize",
        "weight_decay",
    )
)


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
        HyperparameterError: A name that this optimizer does not have, a value out of range, a
            learning rate given under both names, a keyword of torch.optim that has no counterpart
            (``amsgrad``, ``maximize``, ``foreach``, ...) and is on, or settings in a parameter
            group.
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
        self._drop_torchs_defaults(hyperparameters)
        if "optimizer" in hyperparameters:
            raise HyperparameterError(
                f"{type(self).__name__} got optimizer={hyperparameters['optimizer']!r}: the class "
                "already names the optimizer. TorchRec adds this key to a dict that it sharded a "
                "table with; pass a fresh dict"
            )
        defaults = spec_of(self.optim_type).resolve(hyperparameters)
        defaults["lr"] = defaults.pop("learning_rate")
        super().__init__(params, defaults)
        for group in self.param_groups:
            own = sorted(group.keys() - defaults.keys() - {"params"})
            if own:
                raise HyperparameterError(
                    f"torchrec_ext.optim.{type(self).__name__}: a parameter group sets "
                    f"{', '.join(own)}; give hyperparameters as keywords"
                )
        # A class of ours means nothing to TorchRec's stock sharders without the hook.
        install()

    def _drop_torchs_defaults(self, hyperparameters: dict[str, Any]) -> None:
        """Takes out torch.optim's keywords that are off, and refuses those that are on."""
        known = spec_of(self.optim_type).keywords
        for name in _TORCH_KEYWORDS & (hyperparameters.keys() - known.keys()):
            if hyperparameters.pop(name):
                raise HyperparameterError(
                    f"torchrec_ext.optim.{type(self).__name__}: {name} is not supported; leave it "
                    "out"
                )

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
