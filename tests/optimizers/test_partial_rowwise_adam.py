"""PARTIAL_ROWWISE_ADAM: worked numbers and zero rows."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import make_module, single_step


def test_one_second_moment_per_row() -> None:
    module = make_module(OptimType.PARTIAL_ROWWISE_ADAM, [(2, 4)], lr=0.1)
    module(torch.tensor([1]), torch.tensor([0, 1])).backward(torch.tensor([[1.0, 3.0, 1.0, 3.0]]))
    mean, square = module.split_optimizer_states()[0]
    assert square.tolist() == pytest.approx([0.0, 0.005], rel=1e-5)
    assert mean[1].tolist() == pytest.approx([0.1, 0.3, 0.1, 0.3], rel=1e-5)
    # lr * g / sqrt(mean of g^2)
    step = [0.1 * g / 5**0.5 for g in (1.0, 3.0, 1.0, 3.0)]
    row = module.split_embedding_weights()[0][1]
    assert row.tolist() == pytest.approx([-s for s in step], abs=1e-6)


@pytest.mark.parametrize("mode, expected", [("DECOUPLE", 0.890), ("L2", 0.900)])
def test_the_decay_is_taken_from_the_previous_weight(mode, expected) -> None:
    module = make_module(
        OptimType.PARTIAL_ROWWISE_ADAM,
        [(1, 4)],
        lr=0.1,
        weight_decay=0.1,
        weight_decay_mode=mode,
    )
    module.split_embedding_weights()[0].fill_(1.0)
    assert single_step(module, 1.0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_no_gradient_is_no_step(eps) -> None:
    module = make_module(OptimType.PARTIAL_ROWWISE_ADAM, [(1, 4)], lr=0.1, eps=eps)
    module.split_embedding_weights()[0].fill_(0.5)
    assert single_step(module, 0.0) == 0.5
