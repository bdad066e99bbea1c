"""EXACT_ROWWISE_ADAGRAD: Adagrad with one accumulator per row."""

import functools

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import (
    EPS,
    INITIAL_ACCUMULATOR_VALUE,
    LEARNING_RATE,
    WEIGHT_DECAY,
    WEIGHT_DECAY_MODE,
    check_weight_decay,
)
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPEC = OptimizerSpec(
    optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
    hyperparameters=(
        LEARNING_RATE,
        EPS,
        WEIGHT_DECAY,
        WEIGHT_DECAY_MODE,
        INITIAL_ACCUMULATOR_VALUE,
    ),
    states=(State("sum", rowwise=True, initial="initial_accumulator_value"),),
    check=functools.partial(check_weight_decay, OptimType.EXACT_ROWWISE_ADAGRAD),
)
r"""FBGEMM's ``EXACT_ROWWISE_ADAGRAD``. A row's gradients are summed over the batch, then

.. code-block:: text

    g       = g + weight_decay * weight                     if weight_decay_mode is L2
    weight  = weight * (1 - learning_rate * weight_decay)   if weight_decay_mode is DECOUPLE
    sum'    = sum + mean over the row's D columns of g^2
    weight' = weight - learning_rate / (sqrt(sum') + eps) * g

Under column-wise sharding each shard of a row has an accumulator of its own, over its own columns,
as with FBGEMM.
"""
