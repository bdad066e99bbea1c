"""The CUDA kernels with rows whose width is no multiple of 4: the same bits as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_ext import ops

from ..cuda_shim.library import FORWARD, RANDOM, REVERSE
from . import cases
from .cases import Case
from .test_kernels import FACTORS, assert_devices_agree, name_of

pytestmark = pytest.mark.usefixtures("poisoned")

# Alone, beside multiples of 4, and around the columns that 8, 16 and 32 lanes meet in one go.
DIMS = (
    (1,),
    (2,),
    (3,),
    (5,),
    (6,),
    (7,),
    (9,),
    (8, 3),
    (1, 32, 7),
    (31, 33, 64),
    (34, 1),
    (63, 65),
    (127, 4, 129),
    (130, 2),
    (515, 8),
    (2047, 2048, 1),
)
COVERING = cases.covering({**FACTORS, "dims": DIMS})
SEGMENTS = (1, 2, 31, 32, 33, 63, 64, 65, 1000, 1023, 1024, 1025, 2049)


@pytest.mark.parametrize("factors", COVERING, ids=name_of)
def test_any_two_features_together(factors: dict[str, Any]) -> None:
    assert_devices_agree(factors)


@pytest.mark.parametrize("variant", tuple(cases.VARIANTS))
@pytest.mark.parametrize("dim", [3, 34, 131])
def test_rows_around_the_sizes_of_sums(dim: int, variant: str) -> None:
    segments = [*SEGMENTS, *reversed(SEGMENTS)]
    case = Case(variant, ((len(segments), dim),), (0,), weighted=True, gradient=torch.float16)
    with cases.running(RANDOM):
        cases.assert_updates_agree(cases.make_call(case, cases.lookups_of_segments(segments)))


def test_rows_of_three_levels_of_sums() -> None:
    segments = [1, 32769, 32768 + 1024, 65536, 3]
    case = Case("sgd", ((len(segments), 5),), (0,))
    cases.assert_updates_agree(cases.make_call(case, cases.lookups_of_segments(segments)))


@pytest.mark.parametrize("variant", ["sgd", "rowwise adagrad", "lamb"])
@pytest.mark.parametrize("order", [FORWARD, REVERSE])
def test_long_rows_of_tables_of_several_widths(variant: str, order: int) -> None:
    """Stored sums are as far apart as the widest row is wide."""
    shapes = [(5, dim) for dim in (3, 100, 37, 1)]
    lookups = [cases.lookups_of_segments((1, 1024, 70, 1100, 33))[0] for _ in shapes]
    examples = min(len(lengths) for _, lengths in lookups)
    lookups = [
        (i, torch.cat([lengths[: examples - 1], lengths[examples - 1 :].sum()[None]]))
        for i, lengths in lookups
    ]
    call = cases.make_call(Case(variant, shapes, (0, 1, 2, 3)), lookups)
    with cases.running(order):
        cases.assert_updates_agree(call)


def test_memory_that_begins_at_no_multiple_of_16_bytes() -> None:
    call = cases.make_call(Case("adam L2", ((9, 5), (4, 8)), (0, 1)))
    expected = cases.update_on_cpu(call)
    moved = [torch.cat([tensor.new_ones(1), tensor])[1:] for tensor in [call.weights, *call.states]]
    assert all(tensor.data_ptr() % 16 != 0 for tensor in moved)
    layout = ops.device_layout(call.table_layout, call.feature_table_map, torch.device("cpu"))
    cases.update_in(call, layout, moved[0], moved[1:])
    cases.assert_same_memory(moved, expected)
