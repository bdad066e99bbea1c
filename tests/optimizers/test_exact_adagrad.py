"""EXACT_ADAGRAD: worked numbers."""

import pytest

from torchrec_ext import OptimType

from ..modules import make_module, single_step


def _module(**hyperparameters: float):
    return make_module(OptimType.EXACT_ADAGRAD, [(3, 4)], learning_rate=1.0, **hyperparameters)


def test_a_row_looked_up_twice_is_updated_once() -> None:
    assert single_step(_module(eps=0.0), 0.1, times=2) == pytest.approx(-1.0, abs=1e-6)


def test_initial_accumulator_value() -> None:
    module = _module(eps=0.0, initial_accumulator_value=0.1)
    assert single_step(module, 0.1) == pytest.approx(-0.30151, abs=1e-5)


def test_no_gradient_and_no_eps_leave_the_weight() -> None:
    module = _module(eps=0.0)
    module.split_embedding_weights()[0].fill_(0.5)
    assert single_step(module, 0.0) == 0.5
