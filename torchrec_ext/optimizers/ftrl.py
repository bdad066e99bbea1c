"""FTRL: FTRL-Proximal, whose L1 term makes weights exactly zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import INITIAL_ACCUMULATOR_VALUE
from torchrec_ext.optimizers.hyperparameter import Flag, Hyperparameter, HyperparameterError
from torchrec_ext.optimizers.spec import OptimizerSpec, State

#: What ``linear`` is in rows that were never updated, where their first update is to preserve the
#: initial weight. Equal to 0 for whoever compares it, and never the result of an update.
NEVER_UPDATED = -0.0


def _check(values: Mapping[str, Any]) -> None:
    thresholds = [name for name in ("l1_reg", "l21_reg") if values[name] > 0.0]
    scale = ("ftrl_beta", "initial_accumulator_value", "l2_reg")
    has_scale = values["learning_rate_power"] == 0.0 or any(values[name] > 0.0 for name in scale)
    if values["preserve_initial_weight"] and thresholds and not has_scale:
        raise HyperparameterError(
            f"FTRL: preserve_initial_weight=True with {thresholds[0]}={values[thresholds[0]]!r} is "
            "not legal where ftrl_beta, initial_accumulator_value and l2_reg are all 0: the weight "
            f"would be lost beside {thresholds[0]} in float32; give one of the three a value above "
            "0, or leave preserve_initial_weight out"
        )


def _derive(weights: Tensor, states: Sequence[Tensor], values: Mapping[str, Any]) -> None:
    linear, accum = states
    if values["preserve_initial_weight"]:
        linear.fill_(NEVER_UPDATED)
        return
    factor = values["learning_rate"] if values["multiply_linear_by_lr"] else 1.0
    weights = weights.double()
    raised = accum.double() ** -values["learning_rate_power"]
    denominators = (values["ftrl_beta"] + raised) / values["learning_rate"] + values["l2_reg"]
    numerators = weights * denominators
    norms = numerators.norm(dim=1, keepdim=True)
    radius = values["l21_reg"] * math.sqrt(weights.shape[1])
    numerators *= torch.where(norms == 0.0, 1.0, 1.0 + radius / norms)
    derived = -numerators - weights.sign() * values["l1_reg"]
    # Without a denominator FTRL leaves a weight alone, as it does in a new row.
    linear.copy_(torch.where(denominators == 0.0, 0.0, derived * factor))


SPEC = OptimizerSpec(
    optimizer=OptimType.FTRL,
    hyperparameters=(
        Hyperparameter(
            "learning_rate",
            default=0.01,
            minimum=1e-18,
            aliases=("lr",),
            hint="FTRL divides by it: begin and end schedules above 0, e.g. with eta_min",
        ),
        Hyperparameter("ftrl_beta", default=0.0, minimum=0.0),
        Hyperparameter("l1_reg", default=0.0, minimum=0.0, aliases=("ftrl_l1_reg",)),
        Hyperparameter("l2_reg", default=0.0, minimum=0.0, aliases=("ftrl_l2_reg",)),
        Hyperparameter("learning_rate_power", default=-0.5, minimum=-4.0, maximum=0.0),
        Flag("preserve_initial_weight", fixed=True),
        Hyperparameter("l2_shrinkage_reg", default=0.0, minimum=0.0),
        Flag("multiply_linear_by_lr", fixed=True),
        Hyperparameter("l21_reg", default=0.0, minimum=0.0),
        INITIAL_ACCUMULATOR_VALUE,
    ),
    states=(
        State(
            "linear",
            initial=lambda values: NEVER_UPDATED if values["preserve_initial_weight"] else 0.0,
        ),
        State("accum", initial="initial_accumulator_value"),
    ),
    check=_check,
    derive=_derive,
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
0: the share that is kept is ``(accum'^p - accum^p) / (ftrl_beta + accum'^p)``. Four extensions,
which are off by default and may be combined:

- ``preserve_initial_weight``: the first update of a row starts from the ``linear`` for which the
  equations give the weight that is there,
  ``-weight * ((ftrl_beta + accum^p) / learning_rate + l2_reg) - sign(weight) * l1_reg``, with the
  hyperparameters of that update. Until then the row's ``linear`` is -0. Refused where a threshold
  (``l1_reg``, ``l21_reg``) meets ``ftrl_beta = initial_accumulator_value = l2_reg = 0``. Fixed in a
  built module.
- ``l2_shrinkage_reg`` (TensorFlow's FtrlV2): ``linear'`` has
  ``g + 2 * l2_shrinkage_reg * weight`` in place of ``g``; ``accum'`` keeps ``g^2``.
- ``multiply_linear_by_lr`` (TensorFlow's name): ``linear`` holds ``learning_rate`` times the above,
  so that a change of the learning rate does not move weights where ``l1_reg = l2_reg = l21_reg =
  0``. ``linear' = linear + learning_rate * g - (accum'^p - accum^p) * weight``, thresholds and
  ``l2_reg`` are multiplied by ``learning_rate``, and the divisor is
  ``ftrl_beta + accum'^p + l2_reg * learning_rate``. Fixed in a built module.
- ``l21_reg`` (group lasso on a row of D columns): with u the numerators
  ``sign(linear') * l1_reg - linear'``, 0 where ``|linear'| <= l1_reg``, and
  ``r = l21_reg * sqrt(D)``, the row becomes 0 if ``||u|| <= r``; otherwise u is multiplied by
  ``1 - r / ||u||`` before the division. D and the norm are a shard's under column-wise sharding.
  ``preserve_initial_weight`` then starts from ``-v * (1 + r / ||v||) - sign(weight) * l1_reg``,
  with ``v = weight * ((ftrl_beta + accum^p) / learning_rate + l2_reg)``.
"""
