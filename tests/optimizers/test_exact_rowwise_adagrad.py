"""EXACT_ROWWISE_ADAGRAD: worked numbers."""

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from torchrec_ext import OptimType
from torchrec_ext.optimizers import HyperparameterError

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


@pytest.mark.parametrize("mode, expected", [("DECOUPLE", -0.25), ("L2", 0.0)])
def test_weight_decay(mode, expected) -> None:
    """w=1, g=1, lr=1, wd=.25: the decay of the previous weight, then a step of sign(g)."""
    module = make_module(
        OptimType.EXACT_ROWWISE_ADAGRAD,
        [(2, 4)],
        learning_rate=1.0,
        eps=0.0,
        weight_decay=0.25,
        weight_decay_mode=mode,
    )
    module.split_embedding_weights()[0].fill_(1.0)
    assert single_step(module, 1.0) == expected
    accumulator = float(module.split_optimizer_states()[0][0][0])
    assert accumulator == (1.25**2 if mode == "L2" else 1.0)


def test_a_weight_decay_without_a_mode_for_it_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="weight_decay=0.1 has no effect"):
        make_module(
            OptimType.EXACT_ROWWISE_ADAGRAD,
            [(2, 4)],
            weight_decay=0.1,
            weight_decay_mode=WeightDecayMode.NONE,
        )


def test_no_gradient_and_no_eps_leave_the_weight() -> None:
    module = _module()
    module.split_embedding_weights()[0].fill_(0.5)
    assert single_step(module, 0.0) == 0.5
