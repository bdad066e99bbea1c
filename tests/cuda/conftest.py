"""What the tests of the CUDA kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from . import kernels


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills what torch allocates with NaN or the largest integer, so that reads of it show."""
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


@pytest.fixture(scope="session")
def with_detector() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process that has the kernels with the race detector."""
    kernels.build("race")
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=kernels.load, initargs=("race",)
    ) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
