"""EXACT_SGD: stochastic gradient descent on the rows of a batch."""

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import LEARNING_RATE
from torchrec_ext.optimizers.spec import OptimizerSpec

SPEC = OptimizerSpec(optimizer=OptimType.EXACT_SGD, hyperparameters=(LEARNING_RATE,))
r"""FBGEMM's ``EXACT_SGD``. A row's gradients are summed over the batch, then

.. code-block:: text

    weight' = weight - learning_rate * g
"""
