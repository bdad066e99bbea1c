"""EXACT_ROWWISE_ADAGRAD: Adagrad with one accumulator per row."""

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import EPS, INITIAL_ACCUMULATOR_VALUE, LEARNING_RATE
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPEC = OptimizerSpec(
    optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
    hyperparameters=(LEARNING_RATE, EPS, INITIAL_ACCUMULATOR_VALUE),
    states=(State("sum", rowwise=True, initial="initial_accumulator_value"),),
)
r"""FBGEMM's ``EXACT_ROWWISE_ADAGRAD``. A row's gradients are summed over the batch, then

.. code-block:: text

    sum'    = sum + mean over the row's D columns of g^2
    weight' = weight - learning_rate / (sqrt(sum') + eps) * g

Under column-wise sharding each shard of a row has an accumulator of its own, over its own columns,
as with FBGEMM.
"""
