"""What every test shares: reproducible inputs, and no clock that decides whether a test passes."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
import torch

from torchrec_ext import cuda

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")

# The first backward starts autograd's threads, one for each device. FakeTensorMode makes torch
# believe in a CUDA device, and a process with threads for it cannot fork ranks: so it comes first.
torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same state of torch's generator, alone or in a whole run."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skips what needs a device where there is none."""
    missing = cuda.load() or (None if torch.cuda.is_available() else "there is no CUDA device")
    if missing is not None:
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason=missing))
