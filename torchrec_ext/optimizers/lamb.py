"""LAMB: Adam's direction, scaled per row by the ratio of norms."""

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import (
    BETA1,
    BETA2,
    EPS,
    LEARNING_RATE,
    NO_ACCUMULATOR,
    WEIGHT_DECAY,
)
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPEC = OptimizerSpec(
    optimizer=OptimType.LAMB,
    hyperparameters=(LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY),
    states=(State("exp_avg"), State("exp_avg_sq")),
    ignored=NO_ACCUMULATOR,
    saves_step=lambda h: True,
)
r"""LAMB (You et al., ICLR 2020) with one trust ratio per row, FBGEMM's ``LAMB``:

.. code-block:: text

    exp_avg', exp_avg_sq'   as Adam's
    u       = (exp_avg' / (1 - beta1^t)) / (sqrt(exp_avg_sq' / (1 - beta2^t)) + eps)
              + weight_decay * weight
    weight' = weight - learning_rate * (||weight|| / ||u||) * u

The ratio is 1 where a norm is 0; FBGEMM divides by it. Under column-wise sharding each shard of a
row has norms of its own.
"""
