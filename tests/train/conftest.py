"""Fixtures of the train command's tests."""

from collections.abc import Iterator

import pytest

# Imported before any rank is forked.
import torchrec_ext
from torchrec_ext.train import command  # noqa: F401


@pytest.fixture(autouse=True)
def without_hook() -> Iterator[None]:
    """Every test starts and ends with TorchRec as it was."""
    torchrec_ext.uninstall()
    yield
    torchrec_ext.uninstall()
