"""What the classes of ``torchrec_ext.optim`` have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrec_ext.dense_step import (
    STEP,
    check_meaning,
    check_states,
    check_update,
    initial_states,
    update_parameter,
)
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import HyperparameterError, spec_of
from torchrec_ext.parameter_copies import keep_optimizers_in_copies

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
    """Base of the classes of ``torchrec_ext.optim``: their settings, and a plain parameter's step.

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
        self._meanings: dict[Tensor, dict[str, Any]] = {}
        super().__init__(params, defaults)
        if isinstance(params, list) and len(params) == 1:  # as _apply_optimizer_in_backward does
            keep_optimizers_in_copies(params[0])
        # A class of ours means nothing to TorchRec's stock sharders without the hook.
        if importlib.util.find_spec("torchrec") is not None:
            install()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with settings of their own.

        Raises:
            HyperparameterError: A setting that this optimizer does not have; nothing was changed.
        """
        own = sorted(param_group.keys() - self.defaults.keys() - {"params", "param_names"})
        if own:
            raise HyperparameterError(
                f"torchrec_ext.optim.{type(self).__name__}: a parameter group sets "
                f"{', '.join(own)}; it may set {', '.join(sorted(self.defaults))}"
            )
        super().add_param_group(param_group)

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
            HyperparameterError: A setting of a group is not legal, or cannot change after the first
                step; nothing was changed.
            ValueError: A parameter's dtype or a gradient's layout is not supported; nothing was
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        spec = spec_of(self.optim_type)
        updates = []
        for group in self.param_groups:
            hyperparameters = self._hyperparameters(group)
            updates += [
                (each, hyperparameters) for each in group["params"] if each.grad is not None
            ]
        for parameter, hyperparameters in updates:  # all of them, before anything changes
            states = self.state.get(parameter, {})
            check_update(spec, parameter, parameter.grad, states, hyperparameters)
            check_meaning(spec, parameter, self._meanings.get(parameter), hyperparameters)
        for parameter, hyperparameters in updates:
            states = self.state[parameter]
            if not states:
                states.update(initial_states(spec, parameter, hyperparameters))
            update_parameter(spec, parameter, parameter.grad, states, hyperparameters)
            self._meanings[parameter] = spec.meaning_of_states(hyperparameters)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a load or a copy: states mean what their group says."""
        super().__setstate__(state)
        spec = spec_of(self.optim_type)
        self._meanings = {
            parameter: spec.meaning_of_states(group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in self.state
        }

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
                self.state[parameter][name] = (
                    value.detach().clone(memory_format=torch.contiguous_format).to(device)
                )
