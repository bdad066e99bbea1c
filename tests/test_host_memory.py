"""Host memory of tables: zeros, in huge pages where the system grants them."""

from pathlib import Path

import pytest
import torch

from torchrec_ext import OptimType, host_memory

from .modules import make_module

POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address: int) -> int:
    """The huge pages of the mapping that holds an address, from /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 1000, 3 * host_memory.HUGE_PAGE])
def test_zeros(size, dtype) -> None:
    torch.full((size,), 7.0, dtype=dtype)  # memory that is reused is not zero by itself
    zeros = host_memory.zeros(size, dtype)
    assert zeros.dtype == dtype
    assert torch.equal(zeros, torch.zeros(size, dtype=dtype))


@pytest.mark.skipif(
    not POLICY.exists() or "[never]" in POLICY.read_text(), reason="the system has no huge pages"
)
def test_weights_and_states_lie_in_huge_pages() -> None:
    # malloc takes blocks of more than 32 MiB fresh from the system.
    module = make_module(OptimType.FTRL, [(160 * 1024, 64)])
    for buffer in (module.weights_host, module.linear_host, module.accum_host):
        middle = buffer.data_ptr() + buffer.nbytes // 2
        assert huge_bytes(middle) >= host_memory.HUGE_PAGE


def test_a_buffer_of_the_caller_is_used() -> None:
    buffer = torch.zeros(10 * 4)
    module = make_module(
        OptimType.EXACT_SGD, [(10, 4)], preallocated_host_buffers={"weights": buffer}
    )
    assert module.weights_host.data_ptr() == buffer.data_ptr()
