"""Hyperparameters that several optimizers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.hyperparameter import Choice, Hyperparameter, HyperparameterError

LEARNING_RATE = Hyperparameter("learning_rate", default=0.01, minimum=0.0, aliases=("lr",))
EPS = Hyperparameter("eps", default=1e-8, minimum=0.0)
INITIAL_ACCUMULATOR_VALUE = Hyperparameter(
    "initial_accumulator_value", default=0.0, minimum=0.0, in_kernel=False
)
BETA1 = Hyperparameter("beta1", default=0.9, minimum=0.0, maximum=1.0, below_maximum=True)
BETA2 = Hyperparameter("beta2", default=0.999, minimum=0.0, maximum=1.0, below_maximum=True)
WEIGHT_DECAY = Hyperparameter("weight_decay", default=0.0, minimum=0.0)
#: FBGEMM's ``WeightDecayMode``, as far as it means something here. L2 adds
#: ``weight_decay * weight`` to the gradient; DECOUPLE multiplies the previous weight by
#: ``1 - learning_rate * weight_decay``.
WEIGHT_DECAY_MODE = Choice(
    "weight_decay_mode", default="DECOUPLE", choices={"NONE": 0.0, "L2": 1.0, "DECOUPLE": 2.0}
)
#: What becomes of rows that a batch does not touch: nothing, or what a dense optimizer does to
# them.
SPARSE_MODE = Choice(
    "sparse_mode", default="lazy", choices={"lazy": 0.0, "dense": 1.0}, in_kernel=False, fixed=True
)
NO_ACCUMULATOR = {
    "initial_accumulator_value": "its moments start at 0, which the bias correction presumes"
}


def check_dense_decay(optimizer: OptimType, values: Mapping[str, Any]) -> None:
    """Refuses a decay that would turn sleeping weights around.

    Raises:
        HyperparameterError: ``learning_rate * weight_decay`` >= 1 with ``sparse_mode`` dense.
    """
    rate = values["learning_rate"] * values["weight_decay"]
    if values["sparse_mode"] == "dense" and rate >= 1.0:
        raise HyperparameterError(
            f"{optimizer.name}: learning_rate * weight_decay = {rate!r} is not legal with "
            "sparse_mode=dense; it must be less than 1"
        )


def check_weight_decay(optimizer: OptimType, values: Mapping[str, Any]) -> None:
    """Refuses a weight decay that its mode would drop.

    Raises:
        HyperparameterError: ``weight_decay`` > 0 with ``weight_decay_mode`` NONE.
    """
    if values["weight_decay"] > 0.0 and values["weight_decay_mode"] == "NONE":
        raise HyperparameterError(
            f"{optimizer.name}: weight_decay={values['weight_decay']!r} has no effect with "
            "weight_decay_mode=NONE; give L2 or DECOUPLE, or weight_decay=0"
        )
