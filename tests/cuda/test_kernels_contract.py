"""The suites that every optimizer and the ops pass on the CPU, with the CUDA kernels in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrec_ext import ops

from ..optimizers.test_contract import (
    test_equals_float64_reference,
    test_half_weights_are_rounded_to_nearest,
    test_untouched_rows_keep_their_bits,
    test_without_pooling,
)
from ..test_ops import (
    test_good_arguments_are_good,
    test_sums_in_the_canonical_order,
    test_tables_beyond_32_bits,
)
from . import kernels

__all__ = [
    "test_equals_float64_reference",
    "test_good_arguments_are_good",
    "test_half_weights_are_rounded_to_nearest",
    "test_sums_in_the_canonical_order",
    "test_tables_beyond_32_bits",
    "test_untouched_rows_keep_their_bits",
    "test_without_pooling",
]


@pytest.fixture(scope="module", autouse=True)
def cuda_kernels() -> Iterator[None]:
    """Puts the CUDA kernels in place, and checks that the tests ran them."""
    shim = kernels.loaded()
    shim.shim_reset_statistics()
    with kernels.in_place_of_the_cpu_kernels():
        yield
    assert shim.shim_launches() > 0


def test_the_cuda_kernels_are_in_place() -> None:
    shim = kernels.loaded()
    launches = shim.shim_launches()
    test_good_arguments_are_good()
    # find_lookups, three levels of sums of which none has a place, begin_step and update_rows.
    assert shim.shim_launches() == launches + 3
    assert ops._is_on_device(torch.zeros(1))
