"""The step clock: it counts completed updates, whatever else happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_ext import OptimType

from .modules import fill, make_module, relative_error, single_step


def _adam(weight: float = 1.0, **hyperparameters: Any):
    module = make_module(OptimType.ADAM, [(3, 4)], **{"lr": 0.1, **hyperparameters})
    module.split_embedding_weights()[0].fill_(weight)
    return module


def _forward(module: Any, row: int = 0):
    return module(torch.tensor([row]), torch.tensor([0, 1]))


def test_forwards_leave_the_clock_alone() -> None:
    """FBGEMM counts them, and would give .92559."""
    module = _adam()
    module.eval()
    _forward(module)
    module.train()
    with torch.no_grad():
        _forward(module)
    assert single_step(module, 1.0) == pytest.approx(0.9, abs=1e-6)


def test_a_skipped_backward_is_no_step() -> None:
    module = _adam()
    _forward(module)
    assert int(module.iter) == 0
    assert single_step(module, 1.0) == pytest.approx(0.9, abs=1e-6)


def test_a_backward_of_an_empty_batch_is_a_step() -> None:
    """All ranks count alike, also one that got no lookups for its shard."""
    module = _adam()
    module(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])).sum().backward()
    assert int(module.iter) == 1
    # The bias correction of the second step: m = .1, v = .001.
    expected = 1 - 0.1 * (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5
    assert single_step(module, 1.0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sparse_mode", ["lazy", "dense"])
def test_two_forwards_before_two_backwards_are_two_steps(sparse_mode) -> None:
    """Updates are numbered as the backwards come; each gradient is of its own forward's output."""
    module = _adam(sparse_mode=sparse_mode, weight_decay=0.1)
    exact = torch.ones(3, 4).double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], lr=0.1, weight_decay=0.1)
    for rows in ((0, 1), (1, 0), (2, 0)):
        outputs = [_forward(module, row) for row in rows]
        for row, output in zip(rows, outputs, strict=True):
            output.backward(torch.full_like(output, 0.5))
            exact.grad = torch.zeros_like(exact)
            exact.grad[row] = 0.5
            optimizer.step()
    assert int(module.iter) == 6
    if sparse_mode == "dense":
        module.flush()
        assert relative_error(module.split_embedding_weights()[0], exact.detach()) <= 1e-6


def test_a_resumed_clock_goes_on() -> None:
    module = _adam()
    for _ in range(2):
        single_step(module, 1.0)
    mean, square = module.split_optimizer_states()[0]
    assert float(mean[0, 0]) == pytest.approx(0.19, abs=1e-6)
    assert float(square[0, 0]) == pytest.approx(0.001999, abs=1e-8)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    resumed = _adam()
    resumed.load_state_dict(saved)
    assert single_step(resumed, 1.0) == pytest.approx(0.700, abs=1e-5)
    resumed.load_state_dict(saved)
    resumed.set_optimizer_step(0)
    assert single_step(resumed, 1.0) == pytest.approx(0.64346, abs=1e-5)


def test_a_step_that_is_set_counts_for_the_next_update() -> None:
    module = _adam()
    single_step(module, 1.0)
    module.set_optimizer_step(1000)
    fill(module, [torch.ones(3, 4)])
    module.reset_optimizer_states()
    corrections = (1 - 0.9**1001), (1 - 0.999**1001)
    expected = 1 - 0.1 * (0.1 / corrections[0]) / (0.001 / corrections[1]) ** 0.5
    assert single_step(module, 1.0) == pytest.approx(expected, abs=1e-6)
    for bad in (-1, 1.5, True, 2**31):
        with pytest.raises(ValueError, match=f"step={bad}"):
            module.set_optimizer_step(bad)
    assert int(module.iter) == 1001
