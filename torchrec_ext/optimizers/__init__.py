"""The specs of all optimizers: names, ranges, defaults, states and initial values.

The C++ extension has the updates, these specs everything else. The two are compared when this
package is imported.
"""

from __future__ import annotations

from torchrec_ext import _C
from torchrec_ext.optim_type import OPTIM_TYPES, OptimType
from torchrec_ext.optimizers import (
    adam,
    exact_adagrad,
    exact_rowwise_adagrad,
    exact_sgd,
    ftrl,
    lamb,
    partial_rowwise_adam,
)
from torchrec_ext.optimizers.hyperparameter import (
    Choice,
    Flag,
    Hyperparameter,
    HyperparameterError,
)
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPECS: dict[OptimType, OptimizerSpec] = {
    module.SPEC.optimizer: module.SPEC
    for module in (
        exact_sgd,
        exact_adagrad,
        exact_rowwise_adagrad,
        ftrl,
        adam,
        partial_rowwise_adam,
        lamb,
    )
}


def spec_of(optimizer: OptimType) -> OptimizerSpec:
    """The spec of an optimizer.

    Raises:
        TypeError: ``optimizer`` is not an :class:`~torchrec_ext.OptimType`.
    """
    if not isinstance(optimizer, OptimType):
        raise TypeError(
            f"optimizer={optimizer!r} is not a torchrec_ext.OptimType; use one of "
            f"{', '.join(f'OptimType.{member.name}' for member in OPTIM_TYPES)}"
        )
    return SPECS[optimizer]


def _check_against_extension() -> None:
    registered = _C.registered_optimizers()
    if set(registered) != {optimizer.name for optimizer in SPECS}:
        raise ImportError(
            f"the extension has {sorted(registered)}, the specs {sorted(SPECS, key=str)}"
        )
    for optimizer, spec in SPECS.items():
        states = tuple((state.name, state.rowwise) for state in spec.states if state.when is None)
        found = {"hyperparameters": spec.kernel_hyperparameters, "states": states}
        if registered[optimizer.name] != found:
            raise ImportError(
                f"{optimizer.name}: the extension has {registered[optimizer.name]}, "
                f"the spec {found}; rebuild the extension (pip install .)"
            )


_check_against_extension()

__all__ = [
    "SPECS",
    "Choice",
    "Flag",
    "Hyperparameter",
    "HyperparameterError",
    "OptimizerSpec",
    "State",
    "spec_of",
]
