"""FTRL: FTRL-Proximal, whose L1 term makes weights exactly zero."""

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import INITIAL_ACCUMULATOR_VALUE
from torchrec_ext.optimizers.hyperparameter import Hyperparameter
from torchrec_ext.optimizers.spec import OptimizerSpec, State

SPEC = OptimizerSpec(
    optimizer=OptimType.FTRL,
    hyperparameters=(
        Hyperparameter(
            "learning_rate",
            default=0.01,
            minimum=1e-18,
            aliases=("lr",),
            hint="FTRL divides by it: end a schedule above 0, e.g. with eta_min",
        ),
        Hyperparameter("ftrl_beta", default=0.0, minimum=0.0),
        Hyperparameter("l1_reg", default=0.0, minimum=0.0, aliases=("ftrl_l1_reg",)),
        Hyperparameter("l2_reg", default=0.0, minimum=0.0, aliases=("ftrl_l2_reg",)),
        Hyperparameter("learning_rate_power", default=-0.5, minimum=-4.0, maximum=0.0),
        INITIAL_ACCUMULATOR_VALUE,
    ),
    states=(State("linear"), State("accum", initial="initial_accumulator_value")),
)
r"""FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
Algorithm 1), where ``linear`` is the paper's z, ``accum`` its n, and ``p = -learning_rate_power``
generalises its square root. A row's gradients are summed over the batch, then

.. code-block:: text

    accum'  = accum + g^2
    linear' = linear + g - (accum'^p - accum^p) / learning_rate * weight
    weight' = weight                                       if the denominator below is 0
            = 0                                            else if |linear'| <= l1_reg
            = (sign(linear') * l1_reg - linear')
              / ((ftrl_beta + accum'^p) / learning_rate + l2_reg)       otherwise

``l2_reg`` is the paper's lambda_2; TensorFlow and Keras divide by ``2 * l2``, so their ``l2`` of x
is ``l2_reg = 2x`` here.

The first update of a row discards most of a non-zero initial weight, because ``linear`` starts at
0: the share that is kept is ``(accum'^p - accum^p) / (ftrl_beta + accum'^p)``.
"""
