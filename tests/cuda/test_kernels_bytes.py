"""The bytes that a step reads and writes are those that docs/cuda.md derives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_ext import ops
from torchrec_ext.optimizers import spec_of

from . import cases, kernels
from .cases import Call, Case

SEGMENTS = (1, 5, 32, 33, 40, 64, 100, 1024, 1025, 2100)
# How often the weights of a row are read that the lanes do not meet in one go: once for the sums
# over its columns, or for each of them where they are made in turn, and once for the update.
REDUCING = {
    "rowwise adagrad": 2,
    "partial rowwise adam L2": 2,
    "lamb": 2,
    "ftrl group lasso": 3,
}
WIDE = 128
# How often the states that a sum is made of are read there.
REDUCED_STATES = {"lamb": (2, 2), "ftrl group lasso": (2, 3)}
# Here g++ leaves reads that no sum needs, of some optimizers where columns are read one by one.
# nvcc leaves none.
READ_BY_GCC = {"ftrl group lasso": (3, 3)}
READ_ONE_BY_ONE_BY_GCC = {"partial rowwise adam L2": (2, 1)}


@dataclasses.dataclass
class Traffic:
    """Bytes read and written, of the gradient, the weights and each state."""

    read: list[int]
    written: list[int]


def measure(case: Case, segments: Sequence[int]) -> Traffic:
    """One update, with the detector."""
    torch.manual_seed(0)
    detector = kernels.loaded()
    call = cases.make_call(case, cases.lookups_of_segments(segments))
    weights, states = call.weights.clone(), [state.clone() for state in call.states]
    tables = ops.device_layout(call.table_layout, call.feature_table_map, torch.device("cpu"))
    detector.shim_unwatch_all()
    detector.shim_reset_statistics()
    regions = [watch(tensor) for tensor in [call.gradient, weights, *states]]
    cases.update_in(call, tables, weights, states)
    traffic = Traffic(
        [detector.shim_bytes_read(region) for region in regions],
        [detector.shim_bytes_written(region) for region in regions],
    )
    detector.shim_unwatch_all()
    return traffic


def watch(tensor: Tensor, once_per_warp: bool = False) -> int:
    return kernels.loaded().shim_watch(tensor.data_ptr(), tensor.nbytes, int(once_per_warp))


def derived(case: Case, segments: Sequence[int]) -> Traffic:
    """A row's gradients once for each lookup; weights and states once, or more in wide sums."""
    (_, dim), *_ = case.shapes
    rows, lookups = len(segments), sum(segments)
    optimizer, given = cases.VARIANTS[case.variant]
    spec = spec_of(optimizer)
    states = spec.states_for(spec.resolve(given))
    weights = rows * dim * case.weights.itemsize
    stored = [rows * 4 * (1 if state.rowwise else dim) for state in states]
    times, of_states = 1, (1,) * len(states)
    if dim > WIDE:
        times = REDUCING.get(case.variant, 1)
        one_by_one = READ_ONE_BY_ONE_BY_GCC if dim % 4 != 0 else {}
        known = {**REDUCED_STATES, **READ_BY_GCC, **one_by_one}
        of_states = known.get(case.variant, of_states)
    return Traffic(
        [
            lookups * dim * case.gradient.itemsize,
            times * weights,
            *(size * often for size, often in zip(stored, of_states, strict=True)),
        ],
        [0, weights, *stored],
    )


@pytest.mark.parametrize("dim", [16, 64, 128, 516, 1, 7, 34, 127, 131])
@pytest.mark.parametrize(
    "variant", ["sgd", "adagrad", "ftrl", "adam L2", "adam per row", *REDUCING]
)
@pytest.mark.parametrize(
    ("weights", "gradient"), [(torch.float32, torch.float32), (torch.float16, torch.bfloat16)]
)
def test_weights_states_and_gradients(with_detector, variant, dim, weights, gradient) -> None:
    shapes = ((len(SEGMENTS), dim),)
    case = Case(variant, shapes, weights=weights, stochastic=True, gradient=gradient, weighted=True)
    assert with_detector(measure, case, SEGMENTS) == derived(case, SEGMENTS)


def test_only_the_rows_looked_up(with_detector) -> None:
    segments = (3, 0, 0, 40, 0, 1)
    case = Case("adam L2", ((6, 20),))
    expected = derived(case, [n for n in segments if n > 0])
    assert with_detector(measure, case, segments) == expected


# The rest of a step's traffic is in memory that the op allocates: what is left of all memory
# without the tensors, the library's own data and the host's stack with the arguments of kernels.
# Sorting is the shim's and not counted; a byte counts once for each warp that reads it.


def host_regions() -> list[tuple[int, int]]:
    """Where the library's data and the host's stack are."""
    found, previous = [], ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *rest = line.split(maxsplit=5)
        name = rest[4] if len(rest) == 5 else ""
        # The library's zeros come after it and have no name.
        if name == "[stack]" or "torchrec_ext_cuda-race" in (name or previous):
            begin, end = (int(text, 16) for text in addresses.split("-"))
            found.append((begin, end))
        previous = name
    return found


def measure_scratch(segments: Sequence[int], dim: int, weighted: bool) -> tuple[int, int]:
    """Bytes read and written in an update's scratch memory, under ADAGRAD."""
    torch.manual_seed(0)
    detector = kernels.loaded()
    lookups = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    lengths = torch.ones(len(lookups), dtype=torch.int64)
    case = Case("adagrad", ((len(segments), dim),), weighted=weighted)
    call = cases.make_call(case, [(lookups[torch.randperm(len(lookups))], lengths)])
    detector.shim_unwatch_all()
    detector.shim_reset_statistics()
    everything = detector.shim_watch(1 << 12, (1 << 47) - (1 << 13), 1)
    others = [detector.shim_watch(begin, end - begin, 1) for begin, end in host_regions()]
    others += update_watched(call)
    try:
        return tuple(
            of(everything) - sum(of(other) for other in others)
            for of in (detector.shim_bytes_read, detector.shim_bytes_written)
        )
    finally:
        detector.shim_unwatch_all()


def update_watched(call: Call) -> list[int]:
    """An update that watches its tensors; gives the regions."""
    weights, states = call.weights.clone(), [state.clone() for state in call.states]
    tables = ops.device_layout(call.table_layout, call.feature_table_map, torch.device("cpu"))
    values, step = call.options["hyperparameters"], call.options["step"]
    scalars = ops.step_scalars(values, step, torch.device("cpu"))
    batch = [call.indices, call.offsets]
    batch += [] if call.per_sample_weights is None else [call.per_sample_weights]
    tensors = [call.gradient, weights, *states, *batch, tables.layout, scalars]
    regions = [watch(tensor, once_per_warp=True) for tensor in tensors]
    cases.update_in(call, tables, weights, states, scalars)
    return regions


LEVELS = (32, 1024, 32768)


def stored_sums(segments: Sequence[int], dim: int) -> int:
    """The bytes of the stored sums."""
    return sum(4 * dim * (n // size) for n in segments for size in LEVELS if n > size)


def keys_of_places(lookups: int) -> int:
    """What finding the sums that exist reads of the keys: three for every place."""
    total = 0
    for size in LEVELS:
        for last in range(size - 1, lookups, size):
            total += 4 * (1 + (last >= size // 2) + (last + size // 2 < lookups))
    return total


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(60, 1), (256, 3), (128, 8), (200, 16)])
@pytest.mark.parametrize("dim", [100, 516])
def test_the_numbers_of_lookups_and_rows(with_detector, rows, length, weighted, dim) -> None:
    """With 32 lanes a row is a warp's: keys, begins and the lookups' numbers count once."""
    lookups, each = rows * length, 12 if weighted else 8
    read, written = with_detector(measure_scratch, [length] * rows, dim, weighted)
    # Key, position, source, scale; the optimizer's step has two floats and a count.
    assert written == (4 + each) * lookups + 16
    # A row's key, begin and end; the last row has no end. Every warp reads count and floats.
    warps = 4 * min(-(-32 * lookups // 128), 16 * cases.MULTIPROCESSORS)
    per_row = (4 + 8) * rows - 4
    assert read == each * lookups + per_row + keys_of_places(lookups) + 16 * warps


@pytest.mark.parametrize(
    "segments",
    [(64,), (33, 63), (33, 40, 1, 100), (1024,), (1025, 3), (2100, 40), (5, 3300)],
    ids=str,
)
@pytest.mark.parametrize("dim", [100, 99])
def test_stored_sums_are_written_once_and_read_once(with_detector, segments, dim) -> None:
    lookups = sum(segments)
    read, written = with_detector(measure_scratch, segments, dim, False)
    assert written == 12 * lookups + 16 + stored_sums(segments, dim)
    warps = 4 * min(-(-32 * lookups // 128), 16 * cases.MULTIPROCESSORS)
    least = 8 * lookups + keys_of_places(lookups) + 16 * warps + stored_sums(segments, dim)
    # What is left are begins and counts: a few numbers for each row and for each place.
    assert 0 <= read - least <= 12 * len(segments) + 40 * (lookups // 32 + lookups // 1024)
