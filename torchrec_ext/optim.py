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

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from torchrec_ext.dense_step import STEP, check_states, initial_states, update_parameter
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
    """Base of the classes below: checked hyperparameters, and the step on a plain parameter.

    A row of a parameter ``[rows, ...]`` is what has the same first index; a parameter of one
    dimension is one row. With a sparse gradient (``torch.nn.Embedding(sparse=True)``) only the rows
    that have one are updated. States are float32 whatever the parameter's dtype; float16 and
    bfloat16 parameters are rounded to nearest.

    The keywords are copied and checked here, once per parameter, because TorchRec writes into the
    keyword dict it was given: two tables that share one dict would otherwise share the optimizer
    that was applied first.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: The learning rate under torch's name; ``learning_rate`` is accepted as well.
        **hyperparameters: The optimizer's other hyperparameters, by the names that
            ``fused_params`` takes (see ``torchrec_ext.optimizers``).

    Raises:
        HyperparameterError: A name that this optimizer does not have, a value out of range, a
            learning rate given under both names, a keyword of torch.optim that has no counterpart
            (``amsgrad``, ``maximize``, ``foreach``, ...) and is on, or a setting of a parameter
            group that this optimizer does not have.

    Example:
        >>> import torch
        >>> from torchrec_ext.optim import FTRL
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = FTRL([weight], lr=0.1, ftrl_beta=1.0, l1_reg=0.5)
        >>> weight[0].sum().backward()
        >>> optimizer.step()
        >>> weight[0].detach(), weight[1].count_nonzero()
        (tensor([-0.0250, -0.0250, -0.0250, -0.0250]), tensor(0))
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
        if importlib.util.find_spec("torchrec") is not None:
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
        return {"optimizer": self.optim_type, **self._hyperparameters(self.param_groups[0])}

    def _hyperparameters(self, group: Mapping[str, Any]) -> dict[str, Any]:
        spec = spec_of(self.optim_type)
        names = [hyperparameter.name for hyperparameter in spec.hyperparameters]
        values = {name: group["lr" if name == "learning_rate" else name] for name in names}
        values["learning_rate"] = float(values["learning_rate"])
        return spec.resolve(values)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: Computes the loss once more and returns it.

        Returns:
            The closure's result, or None.

        Raises:
            HyperparameterError: A setting of a group is not legal; nothing was changed.
            ValueError: A parameter's dtype or a gradient's layout is not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        spec = spec_of(self.optim_type)
        resolved = [self._hyperparameters(group) for group in self.param_groups]
        for group, hyperparameters in zip(self.param_groups, resolved, strict=True):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                states = self.state[parameter]
                if not states:
                    states.update(initial_states(spec, parameter, hyperparameters))
                update_parameter(spec, parameter, parameter.grad, states, hyperparameters)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states and settings. States stay float32, whatever the parameters are.

        Raises:
            ValueError: Other states or shapes than this optimizer's; nothing was changed.
        """
        check_states(self, state_dict)
        super().load_state_dict(state_dict)
        parameters = [each for group in self.param_groups for each in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, saved, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                device = value.device if name == STEP else parameter.device
                self.state[parameter][name] = value.detach().clone().to(device)


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
