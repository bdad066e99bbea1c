"""EXACT_SGD: the clipping lines of the definition."""

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import make_module, single_step


def _module():
    return make_module(
        OptimType.EXACT_SGD, [(3, 4)], learning_rate=1.0, gradient_clipping=True, max_gradient=1.0
    )


def test_output_gradient_is_clipped_before_duplicates_are_summed() -> None:
    assert single_step(_module(), 5.0, times=2) == -2.0


def test_output_gradient_is_clipped_before_per_sample_weights() -> None:
    module = _module()
    output = module(
        torch.tensor([0, 0]), torch.tensor([0, 1, 2]), per_sample_weights=torch.tensor([3.0, 3.0])
    )
    output.backward(torch.full_like(output, 5.0))
    assert float(module.split_embedding_weights()[0][0, 0]) == -6.0


@pytest.mark.parametrize("gradient", [-5.0, -1.0, -0.5, 0.5, 1.0, 5.0])
def test_clipping_is_symmetric(gradient) -> None:
    assert single_step(_module(), gradient) == -max(-1.0, min(1.0, gradient))
