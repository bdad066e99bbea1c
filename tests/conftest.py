"""What every test shares: reproducible inputs, and no clock that decides whether a test passes."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same state of torch's generator, alone or in a whole run."""
    torch.manual_seed(0)
