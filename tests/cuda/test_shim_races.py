"""The race detector: what it reports, what it does not, and how it counts bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from tests.cuda.test_shim import ORDERS, SOURCES, run
from tests.cuda_shim import build
from tests.cuda_shim.library import load, order


@pytest.fixture(scope="module")
def detector() -> ctypes.CDLL:
    return load(build.build_library("selftest", SOURCES, variant="race"))


@pytest.fixture(params=ORDERS, ids=["forward", "reverse", "random 1", "random 2"])
def library(detector: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    detector.shim_unwatch_all()
    detector.shim_reset_statistics()
    with order(detector, *request.param):
        yield detector


def races(library: ctypes.CDLL, kernel: str, *arguments: object) -> int:
    library.shim_reset_statistics()
    run(library, kernel, *arguments)
    return library.shim_race_count()


def test_a_missing_barrier(library: ctypes.CDLL) -> None:
    values, out = torch.randn(128), torch.zeros(128)
    assert races(library, "mirror", values, out, 2, 64, 0) > 0
    report = library.shim_race_report().decode()
    for text in ["of shared memory", "write by block", "read by block", "selftest_kernels.cu:"]:
        assert text in report
    # Neither does a redundant barrier raise an alarm.
    assert races(library, "mirror", values, out, 2, 64, 1) == 0
    assert library.shim_race_report() == b""
    assert races(library, "mirror", values, out, 2, 64, 2) == 0


@pytest.mark.parametrize("threads", [32, 64])
def test_a_missing_barrier_between_reads_and_a_write(library: ctypes.CDLL, threads: int) -> None:
    data, out = torch.ones(1), torch.zeros(64)
    assert races(library, "write_after_read", data, out, threads, 0) > 0
    assert races(library, "write_after_read", data, out, threads, 1) == 0


def test_a_missing_synchronization_of_a_warp(library: ctypes.CDLL) -> None:
    values, out = torch.randn(32), torch.zeros(32)
    assert races(library, "mirror_in_group", values, out, 0) > 0
    assert races(library, "mirror_in_group", values, out, 1) == 0
    assert races(library, "mirror_in_group", values, out, 2) == 0


def test_synchronization_reaches_only_the_lanes_of_its_mask(library: ctypes.CDLL) -> None:
    values, out = torch.randn(32), torch.zeros(32)
    assert races(library, "mirror_across_groups", values, out) > 0


def test_synchronization_is_transitive(library: ctypes.CDLL) -> None:
    out = torch.zeros(1)
    assert races(library, "chain", out, 0) > 0
    assert races(library, "chain", out, 1) == 0


def test_synchronization_orders_nothing_that_comes_after_it(library: ctypes.CDLL) -> None:
    assert races(library, "write_after_synchronization", torch.zeros(1), torch.zeros(1)) == 1


@pytest.mark.parametrize("stranger", range(3))
def test_every_reader_is_remembered(library: ctypes.CDLL, stranger: int) -> None:
    data, out = torch.zeros(1), torch.zeros(3)
    assert races(library, "one_reader_left_out", data, out, stranger) == 1
    assert races(library, "one_reader_left_out", data, out, 4) == 0


def test_shuffles_order_no_memory(library: ctypes.CDLL) -> None:
    values, out = torch.randn(32), torch.zeros(32)
    assert races(library, "mirror_by_shuffle", values, out) > 0


def test_barriers_order_nothing_with_threads_that_exited(library: ctypes.CDLL) -> None:
    out = torch.zeros(64)
    assert races(library, "exit_early", out) > 0
    assert races(library, "early_exit", torch.randn(64), out, 40) == 0


def test_blocks_are_never_ordered_and_launches_are(library: ctypes.CDLL) -> None:
    winner = torch.zeros(1, dtype=torch.int32)
    assert races(library, "last_wins", winner, 2, 1) > 0
    library.shim_reset_statistics()
    for _ in range(3):
        run(library, "last_wins", winner, 1, 1)
    assert library.shim_race_count() == 0


def test_neighbouring_bytes_and_atomics_do_not_race(library: ctypes.CDLL) -> None:
    out = torch.zeros(64, dtype=torch.uint8)
    assert races(library, "bytes", out) == 0
    total = torch.zeros(1, dtype=torch.int32)
    assert races(library, "add", total) == 0
    assert int(total) == 192


def test_kernels_without_races(library: ctypes.CDLL) -> None:
    values, out = torch.randn(4, 256), torch.zeros(64)
    assert races(library, "sum", values, out, 4, 256) == 0
    assert races(library, "rotate_floats", values, out, 8) == 0
    assert races(library, "poison", out) == 0


def test_bytes_of_a_copy(library: ctypes.CDLL) -> None:
    source, target = torch.randn(96, 4), torch.zeros(96, 4)
    read = library.shim_watch(source.data_ptr(), 96 * 16, 0)
    written = library.shim_watch(target.data_ptr(), 96 * 16, 0)
    part = library.shim_watch(source.data_ptr() + 8, 100, 0)
    for times in [1, 2]:
        run(library, "copy", source, target, 3, 32)
        assert library.shim_bytes_read(read) == library.shim_bytes_written(written) == 1536 * times
        assert library.shim_bytes_written(read) == library.shim_bytes_read(written) == 0
        assert library.shim_bytes_read(part) == 100 * times
    assert torch.equal(source, target)
    library.shim_reset_statistics()
    assert library.shim_bytes_read(read) == 0


def test_bytes_that_a_warp_reads_together_count_once(library: ctypes.CDLL) -> None:
    indices = torch.tensor([3, 0, 2, 2, 1, 3])
    values, out = torch.randn(4, 32), torch.zeros(6, 32)
    once = library.shim_watch(indices.data_ptr(), indices.nbytes, 1)
    every = library.shim_watch(indices.data_ptr(), indices.nbytes, 0)
    rows = library.shim_watch(values.data_ptr(), values.nbytes, 1)
    for times in [1, 2]:
        run(library, "gather", indices, values, out, 6)
        assert library.shim_bytes_read(once) == 6 * 8 * times
        assert library.shim_bytes_read(every) == 6 * 8 * 32 * times
        assert library.shim_bytes_read(rows) == 6 * 128 * times
    assert torch.equal(out, values[indices])


def test_calls_of_memcpy_count(library: ctypes.CDLL) -> None:
    source, target = torch.randn(25), torch.zeros(32, 25)
    read = library.shim_watch(source.data_ptr(), source.nbytes, 0)
    written = library.shim_watch(target.data_ptr(), target.nbytes, 0)
    run(library, "copy_by_call", source, target, ctypes.c_size_t(100))
    assert library.shim_bytes_read(read) == library.shim_bytes_written(written) == 3200
    assert torch.equal(target, source.expand(32, 25))
