"""ADAM: Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.common import (
    BETA1,
    BETA2,
    EPS,
    LEARNING_RATE,
    NO_ACCUMULATOR,
    SPARSE_MODE,
    WEIGHT_DECAY,
    WEIGHT_DECAY_MODE,
    check_dense_decay,
    check_weight_decay,
)
from torchrec_ext.optimizers.hyperparameter import Choice, HyperparameterError
from torchrec_ext.optimizers.spec import OptimizerSpec, State


def _translate(keywords: dict[str, Any]) -> dict[str, Any]:
    """Reads FBGEMM's ``extra_optimizer_config``."""
    config = keywords.pop("extra_optimizer_config", None)
    if config is None:
        return keywords
    if not hasattr(config, "use_rowwise_bias_correction"):
        raise HyperparameterError(
            f"ADAM: extra_optimizer_config={config!r} is not legal; it must be FBGEMM's "
            "UserEnabledConfigDefinition"
        )
    enabled = [name for name, value in vars(config).items() if value is True]
    others = [name for name in enabled if name != "use_rowwise_bias_correction"]
    if others:
        raise HyperparameterError(
            f"ADAM: extra_optimizer_config sets {', '.join(others)}; only "
            "use_rowwise_bias_correction is supported"
        )
    if enabled and keywords.setdefault("bias_correction", "per_row") != "per_row":
        raise HyperparameterError(
            f"ADAM: bias_correction={keywords['bias_correction']!r} contradicts "
            "extra_optimizer_config, which sets use_rowwise_bias_correction; give one of them"
        )
    return keywords


def _check(values: Mapping[str, Any]) -> None:
    check_weight_decay(OptimType.ADAM, values)
    if values["sparse_mode"] != "dense":
        return
    check_dense_decay(OptimType.ADAM, values)
    reason = None
    if values["weight_decay_mode"] == "L2" and values["weight_decay"] > 0.0:
        reason = "weight_decay_mode=L2 feeds the sleeping weight into its own moments"
    elif values["bias_correction"] == "per_row":
        reason = "bias_correction=per_row counts only the updates that touch a row"
    elif values["beta1"] >= math.sqrt(values["beta2"]):
        reason = (
            f"beta1={values['beta1']!r} >= sqrt(beta2)={math.sqrt(values['beta2'])!r}: "
            "the steps of a sleeping row would not fade"
        )
    elif values["beta1"] >= values["beta2"]:
        reason = (
            f"beta1={values['beta1']!r} >= beta2={values['beta2']!r}: the part of eps in the steps "
            "of a sleeping row would not fade"
        )
    if reason is not None:
        raise HyperparameterError(
            f"ADAM: sparse_mode=dense has no closed form here, because {reason}; "
            "use sparse_mode=lazy, or change that"
        )


SPEC = OptimizerSpec(
    optimizer=OptimType.ADAM,
    hyperparameters=(
        LEARNING_RATE,
        BETA1,
        BETA2,
        EPS,
        WEIGHT_DECAY,
        WEIGHT_DECAY_MODE,
        Choice(
            "bias_correction",
            default="global",
            choices={"global": 0.0, "per_row": 1.0},
            fixed=True,
        ),
        SPARSE_MODE,
    ),
    states=(
        State("exp_avg"),
        State("exp_avg_sq"),
        State("row_counter", rowwise=True, when=lambda h: h["bias_correction"] == "per_row"),
    ),
    ignored=NO_ACCUMULATOR,
    saves_step=lambda h: True,
    translate=_translate,
    check=_check,
)
r"""Adam (Kingma and Ba, ICLR 2015), with L2 or, as AdamW (Loshchilov and Hutter, ICLR 2019),
decoupled weight decay. A row's gradients are summed over the batch, then

.. code-block:: text

    g           = g + weight_decay * weight                     if weight_decay_mode is L2
    weight      = weight * (1 - learning_rate * weight_decay)   if weight_decay_mode is DECOUPLE
    exp_avg'    = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq' = beta2 * exp_avg_sq + (1 - beta2) * g^2
    weight'     = weight - learning_rate * (exp_avg' / (1 - beta1^t))
                           / (sqrt(exp_avg_sq' / (1 - beta2^t)) + eps)

The decay is taken from the previous weight, never from the updated one. ``t`` counts the module's
completed updates, this one included; with ``bias_correction="per_row"`` (FBGEMM's
``use_rowwise_bias_correction``) it counts the row's own, which ``row_counter`` holds.

With ``sparse_mode="lazy"`` rows that a batch does not touch keep weight and states. With
``"dense"`` they move as torch.optim.AdamW moves them, at the cost of the touched rows only (see
:mod:`torchrec_ext.sleeping_rows`).
"""
