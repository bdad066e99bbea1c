"""EXACT_SGD: stochastic gradient descent on the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import (
    LEARNING_RATE,
    SPARSE_MODE,
    WEIGHT_DECAY,
    check_dense_decay,
)
from torchrec_ext.optimizers.hyperparameter import Flag, Hyperparameter, HyperparameterError
from torchrec_ext.optimizers.spec import OptimizerSpec, State


def _check(values: Mapping[str, Any]) -> None:
    check_dense_decay(OptimType.EXACT_SGD, values)
    momentum, dampening = values["momentum"], values["dampening"]
    if momentum == 0.0 and (values["nesterov"] or dampening != 0.0):
        raise HyperparameterError(
            f"EXACT_SGD: nesterov={values['nesterov']!r}, dampening={dampening!r} mean nothing "
            "without momentum; give momentum > 0"
        )
    if values["nesterov"] and dampening != 0.0:
        raise HyperparameterError(
            f"EXACT_SGD: dampening={dampening!r} is not legal with nesterov; it must be 0"
        )


SPEC = OptimizerSpec(
    optimizer=OptimType.EXACT_SGD,
    hyperparameters=(
        LEARNING_RATE,
        Hyperparameter("momentum", default=0.0, minimum=0.0, maximum=1.0, below_maximum=True),
        Hyperparameter("dampening", default=0.0, minimum=0.0, maximum=1.0),
        Flag("nesterov"),
        WEIGHT_DECAY,
        SPARSE_MODE,
    ),
    states=(State("momentum_buffer", when=lambda h: h["momentum"] > 0.0),),
    saves_step=lambda h: h["momentum"] > 0.0,
    check=_check,
)
r"""FBGEMM's ``EXACT_SGD``, with momentum as torch.optim.SGD and decoupled weight decay. A row's
gradients are summed over the batch, then

.. code-block:: text

    weight  = weight * (1 - learning_rate * weight_decay)
    buffer' = momentum * buffer + (1 - dampening) * g
    weight' = weight - learning_rate * buffer'                        without nesterov
            = weight - learning_rate * (g + momentum * buffer')       with nesterov

The module's first update is not dampened. Without momentum there is no buffer, and
``weight' = weight - learning_rate * g``.

With ``sparse_mode="lazy"`` rows that a batch does not touch keep weight and buffer. With
``"dense"`` they move as torch.optim.SGD moves them, at the cost of the touched rows only (see
:mod:`torchrec_ext.sleeping_rows`).
"""
