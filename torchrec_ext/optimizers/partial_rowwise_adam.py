"""PARTIAL_ROWWISE_ADAM: Adam with one second moment per row."""

import functools

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import (
    BETA1,
    BETA2,
    EPS,
    LEARNING_RATE,
    NO_ACCUMULATOR,
    WEIGHT_DECAY,
    WEIGHT_DECAY_MODE,
    check_weight_decay,
)
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPEC = OptimizerSpec(
    optimizer=OptimType.PARTIAL_ROWWISE_ADAM,
    hyperparameters=(LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, WEIGHT_DECAY_MODE),
    states=(State("exp_avg"), State("exp_avg_sq", rowwise=True)),
    ignored=NO_ACCUMULATOR,
    saves_step=lambda h: True,
    check=functools.partial(check_weight_decay, OptimType.PARTIAL_ROWWISE_ADAM),
)
r"""FBGEMM's ``PARTIAL_ROWWISE_ADAM``: as :mod:`~torchrec_ext.optimizers.adam`, but

.. code-block:: text

    exp_avg_sq' = beta2 * exp_avg_sq + (1 - beta2) * mean over the row's D columns of g^2

Under column-wise sharding each shard of a row has a second moment of its own, over its own columns.
"""
