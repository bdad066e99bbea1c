"""The CUDA kernels with rows of many lookups, batches of many rows, and those with none."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext import ops

from ..cuda_shim.library import RANDOM, REVERSE
from . import cases
from .cases import Case

pytestmark = pytest.mark.usefixtures("poisoned")

SEGMENTS = (1, 2, 31, 32, 33, 63, 64, 65, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 5000)


def segments_case(dim: int, segments: list[int], variant: str = "sgd", **changes) -> Case:
    return Case(variant, ((len(segments), dim),), (0,), **changes)


@pytest.mark.parametrize(("dim", "variant"), [(8, "sgd"), (36, "adam L2"), (132, "lamb")])
@pytest.mark.parametrize("order", [REVERSE, RANDOM])
def test_rows_around_the_sizes_of_sums(dim: int, variant: str, order: int) -> None:
    segments = [*SEGMENTS, *reversed(SEGMENTS)]
    case = segments_case(dim, segments, variant, weighted=True)
    with cases.running(order):
        cases.assert_updates_agree(cases.make_call(case, cases.lookups_of_segments(segments)))


@pytest.mark.parametrize("length", [33, 63, 64, 65, 1025, 1057, 2049])
@pytest.mark.parametrize("first", [1, 30, 1000])
def test_long_rows_one_after_another(length: int, first: int) -> None:
    """Rows of n lookups begin at all, or 40, offsets modulo 32 and modulo 1,024."""
    segments = [first] + [length] * 40
    call = cases.make_call(segments_case(4, segments), cases.lookups_of_segments(segments))
    cases.assert_updates_agree(call)


@pytest.mark.parametrize("multiprocessors", [1, 4])
@pytest.mark.parametrize(
    "segments",
    [
        [5000, 32768, 31],
        [1, 32769, 32768 + 1024, 65536, 3],
        [1000, 65537, 1025, 66000],
        [33000, 32768 + 1025, 32768 + 32, 32769],
    ],
    ids=str,
)
def test_rows_of_several_levels_of_sums(segments: list[int], multiprocessors: int) -> None:
    call = cases.make_call(segments_case(4, segments), cases.lookups_of_segments(segments))
    with cases.running(multiprocessors=multiprocessors):
        cases.assert_updates_agree(call)


def test_long_rows_of_tables_of_several_widths() -> None:
    """Stored sums are as far apart as the widest row is wide."""
    segments = (1, 1024, 70, 1100, 33)
    shapes = [(5, dim) for dim in (4, 100, 36, 32)]
    lookups = [cases.lookups_of_segments(segments)[0] for _ in shapes]
    examples = min(len(lengths) for _, lengths in lookups)
    lookups = [(i, _shortened(lengths, examples)) for i, lengths in lookups]
    for variant in ("sgd", "rowwise adagrad"):
        cases.assert_updates_agree(cases.make_call(Case(variant, shapes, (0, 1, 2, 3)), lookups))


def _shortened(lengths: torch.Tensor, bags: int) -> torch.Tensor:
    """As many lookups in fewer bags."""
    return torch.cat([lengths[: bags - 1], lengths[bags - 1 :].sum()[None]])


def test_stored_sums_of_half_gradients_are_float32() -> None:
    segments = [1200, 40]
    case = segments_case(8, segments, gradient=torch.float16, weights=torch.float16)
    cases.assert_updates_agree(cases.make_call(case, cases.lookups_of_segments(segments)))


@pytest.mark.parametrize("dim", [8, 36, 68])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 32, 33, 127, 128, 129, 1025])
def test_numbers_of_rows_around_warps_and_blocks(dim: int, rows: int) -> None:
    lookups = [(torch.randperm(rows), torch.ones(rows, dtype=torch.int64))]
    for multiprocessors in (1, 4, 132):
        with cases.running(multiprocessors=multiprocessors):
            for variant in ("adagrad", "rowwise adagrad"):
                case = Case(variant, ((rows, dim),), weighted=True)
                call = cases.make_call(case, lookups)
                cases.assert_updates_agree(call)
                cases.assert_weight_gradients_agree(call)


def test_more_bags_than_lookups_and_more_lookups_than_bags() -> None:
    for longest, examples in ((1, 700), (300, 3)):
        case = Case("ftrl", ((40, 8), (5, 8)), (0, 1))
        with cases.running(multiprocessors=1):
            call = cases.make_call(case, cases.random_lookups(case, examples, longest))
            cases.assert_updates_agree(call)


@pytest.mark.parametrize("examples", [0, 1, 200])
@pytest.mark.parametrize(
    ("variable", "pooling"),
    [
        (False, ops.POOLING_SUM),
        (False, ops.POOLING_MEAN),
        (False, ops.POOLING_NONE),
        (True, ops.POOLING_SUM),
        (True, ops.POOLING_MEAN),
    ],
)
def test_batches_without_lookups_change_nothing(examples, variable, pooling) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    lookups = [(nothing, torch.zeros(examples, dtype=torch.int64))] * 2
    case = Case("lamb", ((4, 8), (0, 8)), (0, 1), pooling=pooling, variable=variable)
    call = cases.make_call(case, lookups)
    cases.assert_same_memory(cases.update_on_cuda(call), [call.weights, *call.states])
    if pooling != ops.POOLING_NONE:
        cases.assert_weight_gradients_agree(call)


def test_the_sign_of_a_zero() -> None:
    """A sum of one -0 is -0, which takes a weight of -0 to +0; from +0 it would stay -0."""
    segments = [1, 2, 33, 1025]
    for variant in ("sgd", "sgd momentum"):
        call = cases.make_call(
            segments_case(4, segments, variant), cases.lookups_of_segments(segments)
        )
        for tensor in (call.gradient, call.weights, *call.states):
            tensor.fill_(-0.0)
        cases.assert_updates_agree(call)


def test_infinity_and_nan_pass() -> None:
    segments = [1, 2, 33, 1025]
    for variant in cases.VARIANTS:
        case = segments_case(8, segments, variant, weights=torch.float16, stochastic=True)
        call = cases.make_call(case, cases.lookups_of_segments(segments))
        call.gradient[::3, 1] = torch.inf
        call.gradient[1::7, 5] = torch.nan
        found, expected = cases.update_on_cuda(call), cases.update_on_cpu(call)
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left.isnan(), right.isnan())
            assert torch.equal(left.nan_to_num(7.0, 9.0, -9.0), right.nan_to_num(7.0, 9.0, -9.0))
