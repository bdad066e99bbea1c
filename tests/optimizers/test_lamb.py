"""LAMB: the trust ratio, and norms that are zero."""

from __future__ import annotations

import pytest
import torch

from torchrec_ext import OptimType

from ..modules import make_module, single_step


def _module(weight: float, **hyperparameters):
    module = make_module(OptimType.LAMB, [(2, 4)], **{"lr": 0.1, **hyperparameters})
    module.split_embedding_weights()[0].fill_(weight)
    return module


def test_the_step_is_scaled_by_the_ratio_of_norms() -> None:
    # The first direction is the gradient's sign, whose norm is 2; the weight's norm is 6.
    assert single_step(_module(3.0), 0.7) == pytest.approx(3.0 - 0.1 * 3.0, abs=1e-5)


def test_weight_decay_is_a_part_of_the_direction() -> None:
    # The direction is 1 + .5 * 3, and the ratio brings its norm back to the weight's.
    module = _module(3.0, weight_decay=0.5)
    assert single_step(module, 1.0) == pytest.approx(3.0 - 0.1 * (3.0 / 2.5) * 2.5, abs=1e-5)


def test_a_zero_row_moves_by_the_direction_itself() -> None:
    """FBGEMM divides 0 by 0 and gets NaN."""
    module = _module(0.0)
    assert single_step(module, 1.0) == pytest.approx(-0.1, abs=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_zero_direction_leaves_the_weight(eps) -> None:
    module = _module(0.5, eps=eps)
    assert single_step(module, 0.0) == 0.5
    assert not any(state.isnan().any() for state in module.split_optimizer_states()[0])


def test_rows_have_ratios_of_their_own() -> None:
    module = _module(1.0)
    module.split_embedding_weights()[0][1] = 2.0
    output = module(torch.tensor([0, 1]), torch.tensor([0, 1, 2]))
    output.backward(torch.ones_like(output))
    assert module.split_embedding_weights()[0][:, 0].tolist() == pytest.approx([0.9, 1.8], abs=1e-6)
