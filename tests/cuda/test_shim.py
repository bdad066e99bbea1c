"""The shim itself: what it runs, and which mistakes of kernels it finds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda_shim import build
from tests.cuda_shim.library import FORWARD, RANDOM, REVERSE, load, order

SOURCES = [build.SHIM / "selftest_kernels.cu", build.SHIM / "selftest_races.cu"]
ORDERS = [(FORWARD, 0), (REVERSE, 0), (RANDOM, 1), (RANDOM, 2)]
LAUNCH_FAILURE = 719
TRAPPED = 710
# In the order of `Mistake` in selftest_kernels.cu.
MISTAKES = [
    (LAUNCH_FAILURE, ["deadlock", "wait in __shfl_xor_sync", "0-4, 6-31", "5 have exited"]),
    (
        LAUNCH_FAILURE,
        ["__ballot_sync with mask 0x000000ff", "__shfl_xor_sync with mask 0x000000ff"],
    ),
    (LAUNCH_FAILURE, ["deadlock", "wait in __syncwarp", "threads 5 wait in __syncthreads"]),
    (LAUNCH_FAILURE, ["(5, 0, 0)", "__syncthreads", "must call the same one"]),
    (LAUNCH_FAILURE, ["__syncwarp with mask 0xfffffffe", "does not name lane 0"]),
    (TRAPPED, ["block (1, 0, 0), thread (5, 0, 0)", "__trap"]),
    (LAUNCH_FAILURE, ["the width is 12"]),
]


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def run(library: ctypes.CDLL, kernel: str, *arguments: object) -> None:
    converted = [pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    error = getattr(library, kernel)(*converted)
    assert error == 0, library.shim_last_error().decode()


@pytest.fixture(scope="module")
def plain() -> ctypes.CDLL:
    return load(build.build_library("selftest", SOURCES))


@pytest.fixture(params=ORDERS, ids=["forward", "reverse", "random 1", "random 2"])
def library(plain: ctypes.CDLL, request: pytest.FixtureRequest) -> ctypes.CDLL:
    with order(plain, *request.param):
        yield plain


def rotated(values: torch.Tensor, width: int) -> torch.Tensor:
    groups = values.view(-1, width)
    return torch.cat([groups[i].roll(-(i + 1)) for i in range(len(groups))])


@pytest.mark.parametrize("width", [8, 16, 32])
def test_shuffles_within_groups_that_diverge(library: ctypes.CDLL, width: int) -> None:
    for kernel, dtype in [("rotate_floats", torch.float32), ("rotate_doubles", torch.float64)]:
        values = torch.randn(64, dtype=dtype)
        out = torch.zeros_like(values)
        run(library, kernel, values, out, width)
        assert torch.equal(out, rotated(values, width))


@pytest.mark.parametrize("width", [8, 16, 32])
def test_xor_fold(library: ctypes.CDLL, width: int) -> None:
    values = torch.randn(64)
    sums = torch.zeros(64)
    run(library, "fold", values, sums, width)
    folded = values.clone()
    for offset in [16, 8, 4, 2, 1]:
        if offset < width:
            folded = folded + folded[torch.arange(64) ^ offset]
    assert torch.equal(sums, folded)


@pytest.mark.parametrize("width", [8, 16, 32])
def test_shifts_end_at_the_segment(library: ctypes.CDLL, width: int) -> None:
    values = torch.arange(100, 132, dtype=torch.int32)
    down, up, crossed = (torch.zeros_like(values) for _ in range(3))
    run(library, "shift", values, down, up, crossed, width)
    lane = torch.arange(32)
    in_segment = lane % width
    assert torch.equal(down, values[torch.where(in_segment + 3 < width, lane + 3, lane)])
    assert torch.equal(up, values[torch.where(in_segment >= 3, lane - 3, lane)])
    # PTX: xor may reach into segments before its own, but not into those behind it.
    last = lane - in_segment + width - 1
    assert torch.equal(crossed, values[torch.where(lane ^ 12 <= last, lane ^ 12, lane)])


def test_a_lane_that_the_mask_does_not_name_gives_nan(library: ctypes.CDLL) -> None:
    out = torch.zeros(16)
    run(library, "unnamed_lane", out)
    assert out[0].isnan() and torch.equal(out[1:], torch.ones(15))


def test_votes(library: ctypes.CDLL) -> None:
    predicates = torch.tensor([0] * 8 + [1] * 8 + [0, 1] * 4 + [0] * 7 + [1], dtype=torch.int32)
    ballots, any_lane, all_lanes = (torch.zeros(32, dtype=torch.int32) for _ in range(3))
    run(library, "vote", predicates, ballots, any_lane, all_lanes)
    # As signed numbers, which torch has.
    expected = [0, 0xFF00, 0xAA0000, -(1 << 31)]
    assert ballots.view(4, 8).tolist() == [[ballot] * 8 for ballot in expected]
    assert any_lane.view(4, 8).tolist() == [[0] * 8, [1] * 8, [1] * 8, [1] * 8]
    assert all_lanes.view(4, 8).tolist() == [[0] * 8, [1] * 8, [0] * 8, [0] * 8]


@pytest.mark.parametrize("threads", [1, 48, 64, 1024])
def test_exchange_through_shared_memory(library: ctypes.CDLL, threads: int) -> None:
    values = torch.randn(3, threads)
    out = torch.zeros_like(values)
    run(library, "mirror", values, out, 3, threads, 1)
    assert torch.equal(out, values.flip(1))


@pytest.mark.parametrize("count", [1, 31, 40, 64])
def test_barriers_do_not_wait_for_threads_that_exited(library: ctypes.CDLL, count: int) -> None:
    values = torch.randn(64)
    out = torch.zeros(64)
    run(library, "early_exit", values, out, count)
    assert torch.equal(out, torch.cat([values[:count].flip(0), torch.zeros(64 - count)]))


def test_shared_memory_starts_as_nan_in_every_block(library: ctypes.CDLL) -> None:
    out = torch.zeros(64)
    run(library, "poison", out)
    assert out.isnan().all()


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_fail_the_launch(library: ctypes.CDLL, mistake: int) -> None:
    code, texts = MISTAKES[mistake]
    for _ in range(2):
        assert library.mistake(mistake) == code
        error = library.shim_last_error().decode()
        for text in ["mistake_kernel", "selftest_kernels.cu:", *texts]:
            assert text in error
        assert library.take_last_error() == code and library.take_last_error() == 0
        # The next launch has nothing left of it.
        test_exchange_through_shared_memory(library, 64)


@pytest.mark.parametrize(
    ("threads", "blocks", "shared_bytes", "text"),
    [
        ((1025, 1, 1), 1, 0, "1025 x 1 x 1"),
        ((33, 32, 1), 1, 0, "33 x 32 x 1"),
        ((1, 1, 65), 1, 0, "1 x 1 x 65"),
        ((0, 1, 1), 1, 0, "0 x 1 x 1"),
        ((32, 1, 1), 0, 0, "0 x 1 x 1"),
        ((32, 1, 1), 1, 49153, "not 49153"),
    ],
)
def test_launches_that_cuda_refuses(
    plain: ctypes.CDLL, threads: tuple[int, ...], blocks: int, shared_bytes: int, text: str
) -> None:
    plain.shim_reset_statistics()
    assert plain.launch_of(*threads, blocks, ctypes.c_size_t(shared_bytes)) in (1, 9)
    assert text in plain.shim_last_error().decode()
    assert plain.shim_launches() == 0
    # It traps, because it runs.
    assert plain.launch_of(16, 32, 2, 2, ctypes.c_size_t(49152)) == TRAPPED
    assert plain.shim_launches() == 1


def test_orders_decide_who_wins_a_race(plain: ctypes.CDLL) -> None:
    winner = torch.zeros(1, dtype=torch.int32)

    def winner_in(which: int, seed: int = 0) -> int:
        with order(plain, which, seed):
            run(plain, "last_wins", winner, 4, 64)
        return int(winner)

    assert winner_in(FORWARD) == 255 and winner_in(REVERSE) == 0
    random = [winner_in(RANDOM, seed) for seed in range(8)]
    assert len(set(random)) > 1
    assert random == [winner_in(RANDOM, seed) for seed in range(8)]


def test_orders_agree_without_a_race(plain: ctypes.CDLL) -> None:
    values = torch.randn(5, 256)
    sums = []
    for which, seed in ORDERS:
        with order(plain, which, seed):
            sums.append(torch.zeros(5))
            run(plain, "sum", values, sums[-1], 5, 256)
    assert all(torch.equal(sum_, sums[0]) for sum_ in sums)
    torch.testing.assert_close(sums[0], values.sum(1))


def test_number_of_multiprocessors(plain: ctypes.CDLL) -> None:
    assert plain.multiprocessors() == 4
    plain.shim_set_multiprocessors(132)
    try:
        assert plain.multiprocessors() == 132
    finally:
        plain.shim_set_multiprocessors(4)


def test_ucontext_in_place_of_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMMON_FLAGS", (*build.COMMON_FLAGS, "-DCUDA_SHIM_UCONTEXT"))
    library = load(build.build_library("selftest-ucontext", SOURCES))
    test_shuffles_within_groups_that_diverge(library, 8)
    test_mistakes_fail_the_launch(library, 0)


SANITIZED_RUN = """
import ctypes, sys
from pathlib import Path
from tests.cuda_shim.library import load, order
library = load(Path(sys.argv[1]))
floats = ctypes.c_float * 2048
values, out = floats(*range(2048)), floats()
for which in range(3):
    with order(library, which, 1):
        # What threads of failed launches left on their stacks must not disturb the next ones.
        for mistake in range(7):
            assert library.mistake(mistake) != 0
            assert library.mirror(values, out, 2, 1024, 1) == 0
            assert library.fold(values, out, 8) == 0
            assert library.early_exit(values, out, 40) == 0
assert library.leave_large_stack(out) != 0
assert library.use_large_stack(out) == 0
begin = (ctypes.addressof(values) + 15) // 16 * 16
assert library.overrun(3, 16) == 0
assert library.copy(ctypes.c_void_p(begin), out, 1, 32) == 0
print("before", flush=True)
if sys.argv[2] == "overrun":
    library.overrun(4, 16)
else:
    library.copy(ctypes.c_void_p(begin + 4), out, 1, 32)
"""


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        ("overrun", ["heap-buffer-overflow", "in overrun_kernel"]),
        ("misaligned", ["misaligned address", "in copy_kernel"]),
    ],
)
def test_sanitizers_find_mistakes(mistake: str, texts: list[str]) -> None:
    path = build.build_library("selftest", SOURCES, variant="sanitized")
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED_RUN, str(path), mistake],
        env=os.environ | build.sanitizer_environment(),
        cwd=build.SHIM.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stdout == "before\n", done.stderr
    assert all(text in done.stderr for text in texts), done.stderr


def test_nothing_is_built_twice(tmp_path: Path) -> None:
    source = tmp_path / "one.cu"
    source.write_text('extern "C" __attribute__((visibility("default"))) int f() { return VALUE; }')
    first = build.build_library("one", [source], flags=["-DVALUE=1"])
    built = first.stat().st_mtime_ns
    second = build.build_library("one", [source], flags=["-DVALUE=2"])
    assert ctypes.CDLL(str(first)).f() == 1 and ctypes.CDLL(str(second)).f() == 2
    assert build.build_library("one", [source], flags=["-DVALUE=1"]) == first
    assert first.stat().st_mtime_ns == built
    with pytest.raises(RuntimeError, match="VALUE.* was not declared"):
        build.build_library("one", [source])
