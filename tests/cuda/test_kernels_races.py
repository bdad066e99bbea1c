"""The CUDA kernels under the race detector: no access races with another, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchrec_ext import ops

from ..cuda_shim.library import FORWARD, RANDOM, REVERSE
from . import cases, kernels
from .cases import Case

ORDERS = (FORWARD, REVERSE, RANDOM)
FACTORS = {
    "variant": (
        "sgd",
        "sgd momentum",
        "adagrad",
        "rowwise adagrad L2",
        "ftrl",
        "ftrl group lasso",
        "adam per row",
        "partial rowwise adam decoupled",
        "lamb",
    ),
    # 8, 16 and 32 lanes; with a tail, and in several goes.
    "dims": ((8, 32), (36, 4), (100, 8), (516, 132), (3, 7), (33, 8), (65, 2), (131, 515)),
    "weights": ((torch.float32, False), (torch.float16, True), (torch.bfloat16, False)),
    "order": ORDERS,
    "multiprocessors": (1, 4),
    "batch": (
        {"weighted": True, "pooling": ops.POOLING_MEAN},
        {"variable": True, "index": torch.int32},
    ),
}


def races_of(case: Case, segments: Sequence[int], order: int, multiprocessors: int = 4) -> str:
    """What races in an update and in a gradient of per-sample weights, which are right."""
    torch.manual_seed(0)
    detector = kernels.loaded()
    detector.shim_reset_statistics()
    lookups = cases.lookups_of_segments(segments) if segments else cases.random_lookups(case, 30)
    call = cases.make_call(case, lookups)
    with cases.running(order, multiprocessors):
        cases.assert_updates_agree(call)
        if case.pooling != ops.POOLING_NONE:
            cases.assert_weight_gradients_agree(call)
    assert detector.shim_launches() > 0
    return detector.shim_race_report().decode()


@pytest.mark.parametrize(
    "factors",
    cases.covering(FACTORS),
    ids=lambda f: f"{f['variant']}-{f['dims']}-{f['order']}",
)
def test_any_two_features_together(with_detector, factors: dict[str, Any]) -> None:
    """A table's first row has a third of the lookups, enough for stored sums."""
    first, second = factors["dims"]
    weights, stochastic = factors["weights"]
    shapes, features = ((11, first), (1, second), (3, first)), (0, 1, 2, 0)
    case = Case(
        factors["variant"],
        shapes,
        features,
        weights=weights,
        stochastic=stochastic,
        **factors["batch"],
    )
    assert with_detector(races_of, case, (), factors["order"], factors["multiprocessors"]) == ""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("variant", "dim"), [("adagrad", 132), ("lamb", 36), ("adagrad", 7), ("lamb", 130)]
)
def test_rows_of_two_levels_of_sums(with_detector, variant: str, dim: int, order: int) -> None:
    segments = (1, 2, 33, 64, 1025, 3, 2100)
    assert with_detector(races_of, Case(variant, ((7, dim),)), segments, order) == ""


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_three_levels_of_sums(with_detector, order: int) -> None:
    segments = (40, 32769 + 1025, 3)
    assert with_detector(races_of, Case("sgd", ((3, 4),)), segments, order) == ""
