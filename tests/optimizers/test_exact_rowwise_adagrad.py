"""EXACT_ROWWISE_ADAGRAD: worked numbers."""

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import make_module, single_step


def _module():
    return make_module(OptimType.EXACT_ROWWISE_ADAGRAD, [(2, 4)], learning_rate=1.0, eps=0.0)


def test_one_accumulator_per_row() -> None:
    module = _module()
    module(torch.tensor([1]), torch.tensor([0, 1])).backward(torch.tensor([[1.0, 3.0, 1.0, 3.0]]))
    (accumulator,) = module.split_optimizer_states()[0]
    assert accumulator.tolist() == [0.0, 5.0]
    row = module.split_embedding_weights()[0][1]
    assert row.tolist() == pytest.approx([-0.44721, -1.34164, -0.44721, -1.34164], abs=1e-5)


def test_no_gradient_and_no_eps_leave_the_weight() -> None:
    module = _module()
    module.split_embedding_weights()[0].fill_(0.5)
    assert single_step(module, 0.0) == 0.5
