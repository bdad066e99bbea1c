"""Fixtures of the distributed tests."""

from collections.abc import Iterator

import pytest
from torchrec.distributed import batched_embedding_kernel  # noqa: F401  (imported before any fork)

import torchrec_ext


@pytest.fixture(autouse=True)
def without_hook() -> Iterator[None]:
    """Every test starts and ends with TorchRec as it was."""
    torchrec_ext.uninstall()
    yield
    torchrec_ext.uninstall()
