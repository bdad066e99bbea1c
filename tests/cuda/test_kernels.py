"""The CUDA kernels, run on the CPU: weights, states and gradients have the CPU kernels' bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchrec_ext import ops

from ..cuda_shim.library import FORWARD, RANDOM, REVERSE
from . import cases
from .cases import Case

pytestmark = pytest.mark.usefixtures("poisoned")

HALF, BFLOAT16 = torch.float16, torch.bfloat16
# The widest table decides how many lanes a row gets: 8 up to 32 columns, 16 up to 64, then 32.
DIMS = (
    (4,),
    (8, 4),
    (20, 32),
    (28,),
    (36, 8),
    (64, 4, 60),
    (68, 64),
    (100,),
    (128, 20),
    (132, 128),
    (516, 4),
    (1020, 516),
    (1024,),
    (2048, 36),
)
# Lookups of a feature without pooling all have gradients of one width.
BATCHES: dict[str, dict[str, Any]] = {
    "sum": {},
    "mean": {"pooling": ops.POOLING_MEAN},
    "none": {"pooling": ops.POOLING_NONE},
    "weighted sum": {"weighted": True},
    "weighted mean": {"weighted": True, "pooling": ops.POOLING_MEAN},
    "variable sum": {"variable": True},
    "variable weighted mean": {"variable": True, "weighted": True, "pooling": ops.POOLING_MEAN},
}
FACTORS = {
    "variant": tuple(cases.VARIANTS),
    "dims": DIMS,
    "weights": (
        (torch.float32, False),
        (HALF, False),
        (HALF, True),
        (BFLOAT16, False),
        (BFLOAT16, True),
    ),
    "gradient": (torch.float32, HALF, BFLOAT16),
    "gradient_layout": cases.GRADIENT_LAYOUTS,
    "index": (torch.int32, torch.int64),
    "batch": tuple(BATCHES),
    "max_gradient": (math.inf, 0.7, 0.0),
    "step": (0, 5),
    "order": (FORWARD, REVERSE, RANDOM),
    "multiprocessors": (1, 4, 132),
}
COVERING = cases.covering(FACTORS)


def case_of(factors: dict[str, Any]) -> Case:
    """Tables of 1, 3, 11 and no rows; two of them are read by two features."""
    batch = BATCHES[factors["batch"]]
    dims = factors["dims"]
    if factors["batch"] == "none":
        dims = dims[:1] * 4
    rows = (11, 1, 3, 0)
    shapes = [(rows[i], dims[i % len(dims)]) for i in range(4)]
    weights, stochastic = factors["weights"]
    return Case(
        factors["variant"],
        shapes,
        (0, 1, 3, 0, 2, 1),
        weights,
        stochastic,
        factors["gradient"],
        factors["gradient_layout"],
        factors["index"],
        max_gradient=factors["max_gradient"],
        step=factors["step"],
        **batch,
    )


def name_of(factors: dict[str, Any]) -> str:
    return "-".join(str(factors[name]) for name in ("variant", "dims", "batch"))


def assert_devices_agree(factors: dict[str, Any]) -> None:
    """Updates and the gradients of per-sample weights have the CPU's bits."""
    case = case_of(factors)
    call = cases.make_call(case)
    with cases.running(factors["order"], factors["multiprocessors"]):
        if case.max_gradient == 0.0:
            cases.assert_same_memory(cases.update_on_cuda(call), cases.update_on_cpu(call))
        else:
            cases.assert_updates_agree(call)
        if case.pooling != ops.POOLING_NONE:
            required = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int32)
            cases.assert_weight_gradients_agree(call)
            cases.assert_weight_gradients_agree(call, required)


@pytest.mark.parametrize("factors", COVERING, ids=name_of)
def test_any_two_features_together(factors: dict[str, Any]) -> None:
    assert_devices_agree(factors)
