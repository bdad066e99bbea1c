"""EXACT_ADAGRAD: Adagrad with one accumulator per weight."""

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import EPS, INITIAL_ACCUMULATOR_VALUE, LEARNING_RATE
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPEC = OptimizerSpec(
    optimizer=OptimType.EXACT_ADAGRAD,
    hyperparameters=(LEARNING_RATE, EPS, INITIAL_ACCUMULATOR_VALUE),
    states=(State("sum", initial="initial_accumulator_value"),),
)
r"""Adagrad (Duchi, Hazan and Singer, JMLR 2011), FBGEMM's ``EXACT_ADAGRAD``. A row's gradients are
summed over the batch, then

.. code-block:: text

    sum'    = sum + g^2
    weight' = weight - learning_rate * g / (sqrt(sum') + eps)

Where ``sqrt(sum') + eps`` is 0 the weight stays; FBGEMM divides 0 by 0 there.
"""
