"""``sparse_mode="dense"``: what a dense optimizer does to all rows, done when a row is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_ext import OptimType, optimizer_clock, sleeping_rows

from . import reference
from .modules import HALF, assert_same_bits, fill, make_module, relative_error, snapshot

ROWS, DIM, LOOKUPS = 200, 4, 6


def _schedule(step: int, steps: int, peak: float) -> float:
    """Warm-up over a tenth, then a cosine."""
    warm = steps // 10
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def _zipf(rows: int, count: int) -> Tensor:
    weights = 1.0 / torch.arange(1, rows + 1).double() ** 1.05
    return torch.multinomial(weights, count, replacement=True)


def _worst(
    module: Any, optimizer: Any, exact: Tensor, steps: int, peak: float, scale: float
) -> float:
    """The largest difference of a forward's output, and of all weights after a flush."""
    worst = 0.0
    offsets = torch.arange(LOOKUPS + 1)
    for step in range(steps):
        rate = _schedule(step, steps, peak)
        module.set_learning_rate(rate)
        optimizer.param_groups[0]["lr"] = rate
        indices = _zipf(len(exact), LOOKUPS)
        output = module(indices, offsets)
        worst = max(worst, relative_error(output.detach(), exact.detach()[indices]))
        gradient = torch.randn_like(output) * scale
        output.backward(gradient)
        exact.grad = torch.zeros_like(exact).index_add_(0, indices, gradient.double())
        optimizer.step()
    module.flush()
    return max(worst, relative_error(module.split_embedding_weights()[0], exact.detach()))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-3])
def test_adam_equals_torchs_dense_adamw(scale, eps) -> None:
    module = make_module(
        OptimType.ADAM, [(ROWS, DIM)], eps=eps, weight_decay=0.01, sparse_mode="dense"
    )
    start = torch.randn(ROWS, DIM)
    fill(module, [start])
    exact = start.double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], eps=eps, weight_decay=0.01, foreach=True)
    assert _worst(module, optimizer, exact, 2000, 1e-3, scale) <= 1e-4


@pytest.mark.parametrize(
    "given",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.5},
        {"momentum": 0.99},
    ],
    ids=str,
)
def test_sgd_equals_torchs_dense_sgd(given) -> None:
    module = make_module(OptimType.EXACT_SGD, [(ROWS, DIM)], sparse_mode="dense", **given)
    start = torch.randn(ROWS, DIM)
    fill(module, [start])
    exact = start.double().requires_grad_()
    optimizer = torch.optim.SGD([exact], lr=0.1, foreach=True, **given)
    assert _worst(module, optimizer, exact, 1000, 0.01, 1.0) <= 1e-5


def test_decay_alone_reaches_sleeping_rows() -> None:
    module = make_module(
        OptimType.EXACT_SGD, [(3, 4)], lr=0.1, weight_decay=0.5, sparse_mode="dense"
    )
    fill(module, [torch.ones(3, 4)])
    for _ in range(10):
        module(torch.tensor([0]), torch.tensor([0, 1])).sum().backward()
    module.flush()
    assert float(module.split_embedding_weights()[0][2, 0]) == pytest.approx(0.95**10, rel=1e-6)


def _dense_adam(**keywords: Any):
    torch.manual_seed(1)
    module = make_module(
        OptimType.ADAM, [(9, 4), (7, 8)], lr=0.1, weight_decay=0.1, sparse_mode="dense", **keywords
    )
    fill(module, [torch.randn(9, 4), torch.randn(7, 8)])
    return module


def _train(module: Any, steps: int, seed: int = 0, evaluate: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 2, 4])
    for _ in range(steps):
        indices = torch.randint(0, 7, (4,), generator=generator)
        if evaluate:
            with torch.no_grad():
                module(torch.arange(7).repeat(2), torch.tensor([0, 7, 14]))
        output = module(indices, offsets)
        output.backward(torch.randn(output.shape, generator=generator))


def test_evaluation_sees_rows_as_of_now() -> None:
    module, flushed = _dense_adam(), _dense_adam()
    _train(module, 20)
    _train(flushed, 20)
    flushed.flush()
    everything = torch.cat([torch.arange(9), torch.arange(7), torch.zeros(2, dtype=torch.int64)])
    offsets = torch.cat([torch.arange(10), 9 + torch.arange(1, 8), torch.tensor([17, 18])])
    with torch.no_grad():
        outputs = [each(everything, offsets) for each in (module.eval(), flushed)]
    assert torch.equal(*outputs)


def test_a_catch_up_split_in_two_rounds_differently_and_no_more() -> None:
    often, seldom = _dense_adam(), _dense_adam()
    _train(often, 50, evaluate=True)
    _train(seldom, 50)
    for each in (often, seldom):
        each.flush()
    for left, right in zip(
        often.split_embedding_weights(), seldom.split_embedding_weights(), strict=True
    ):
        assert relative_error(left, right) <= 1e-6


def test_the_same_calls_give_the_same_bits_for_any_number_of_threads() -> None:
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        module = _dense_adam()
        _train(module, 30)
        module.flush()
        found.append(snapshot(module))
    torch.set_num_threads(threads)
    assert_same_bits(*found)


def test_a_flush_leaves_a_module_that_is_up_to_date_alone() -> None:
    module = _dense_adam()
    _train(module, 10)
    module.flush()
    before = snapshot(module)
    module.flush()
    module.state_dict()
    assert_same_bits(before, snapshot(module))
    assert len(module._sleeping.history) == 0


def test_state_dict_is_flushed_and_needs_no_history() -> None:
    module, other = _dense_adam(), _dense_adam()
    _train(module, 25)
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    _train(other, 3, seed=5)
    other.load_state_dict(saved)
    assert int(other.iter) == 25
    for each in (module, other):
        _train(each, 10, seed=2)
        each.flush()
    assert_same_bits(snapshot(module), snapshot(other))


def test_a_long_history_is_flushed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = _dense_adam(), _dense_adam()
    _train(whole, 40)
    monkeypatch.setattr(optimizer_clock, "HISTORY_LIMIT", 16)
    _train(cut, 40)
    assert len(whole._sleeping.history) == 40
    assert len(cut._sleeping.history) == 40 % 16
    for each in (whole, cut):
        each.flush()
    for left, right in zip(
        whole.split_embedding_weights(), cut.split_embedding_weights(), strict=True
    ):
        assert relative_error(left, right) <= 1e-6


def test_a_history_costs_no_more_the_longer_it_is() -> None:
    """An update touches at most ``window`` entries, and each takes 24 bytes."""
    history = sleeping_rows.History(sleeping_rows.Series(0.9), 0)
    for _ in range(1000):
        history.append(0.1, 0.0, 1.0)
    assert history.window == math.ceil(math.log(1e-16) / math.log(0.9))
    steps = history.values[1]
    expected = 0.1 * sum(0.9**k for k in range(1, history.window + 1))
    assert float(steps[0]) == pytest.approx(expected, rel=1e-12)
    assert history.values.shape[1] <= 2 * 1000 + 256


def test_hyperparameters_can_change_during_a_sleep() -> None:
    """Rows are brought up to date with the old values first."""
    module = make_module(OptimType.ADAM, [(2, 4)], lr=0.1, sparse_mode="dense")
    fill(module, [torch.ones(2, 4)])
    exact = torch.ones(2, 4).double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], lr=0.1, weight_decay=0.0)
    for step in range(30):
        if step == 15:
            module.update_hyper_parameters({"beta1": 0.5, "weight_decay": 0.2})
            optimizer.param_groups[0].update(betas=(0.5, 0.999), weight_decay=0.2)
        row = 1 if step == 0 else 0
        module(torch.tensor([row]), torch.tensor([0, 1])).sum().backward()
        exact.grad = torch.zeros_like(exact)
        exact.grad[row] = 1.0
        optimizer.step()
    module.flush()
    assert relative_error(module.split_embedding_weights()[0], exact.detach()) <= 1e-5


def test_tiny_gradients_give_no_infinity() -> None:
    """g^2 underflows in float32 where g does not."""
    module = make_module(OptimType.ADAM, [(2, 4)], lr=0.1, eps=0.0, sparse_mode="dense")
    offsets = torch.tensor([0, 1])
    for row, scale in ((0, 1e-23), (1, 1.0), (1, 1.0)):
        output = module(torch.tensor([row]), offsets)
        output.backward(torch.full_like(output, scale))
    module.flush()
    assert all(value.isfinite().all() for value in snapshot(module))


def test_half_weights_are_caught_up() -> None:
    full, half = _dense_adam(), _dense_adam(**HALF)
    for each in (full, half):
        _train(each, 10)
        each.flush()
    for left, right in zip(
        half.split_embedding_weights(), full.split_embedding_weights(), strict=True
    ):
        assert relative_error(left, right) <= 2e-2


def test_reset_rows_do_not_move_on() -> None:
    module = _dense_adam()
    _train(module, 5)
    module.reset_optimizer_states(0, [0, 3])
    weights = module.split_embedding_weights()[0][[0, 3]].clone()
    module.update_hyper_parameters({"weight_decay": 0.0})
    for _ in range(4):
        module(torch.tensor([8, 2]), torch.tensor([0, 1, 2])).sum().backward()
    module.flush()
    assert torch.equal(module.split_embedding_weights()[0][[0, 3]], weights)


class _DenseFtrl:
    """FTRL on every coordinate in every step, in float64."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self._weights, self._rate = parameters[0], lr
        self._states = [torch.zeros(2).double(), torch.zeros(2).double()]

    def step(self) -> None:
        w, g = self._weights.detach(), self._weights.grad
        new = reference.ftrl(w, g, self._states, 1, learning_rate=self._rate, ftrl_beta=1.0)
        w.copy_(new)


ROSENBROCK = {
    "adam": (
        OptimType.ADAM,
        {"lr": 0.02, "sparse_mode": "dense"},
        lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    ),
    "sgd": (
        OptimType.EXACT_SGD,
        {"lr": 2e-4, "momentum": 0.9, "sparse_mode": "dense"},
        lambda parameters: torch.optim.SGD(parameters, lr=2e-4, momentum=0.9),
    ),
    "ftrl": (
        OptimType.FTRL,
        {"lr": 0.5, "ftrl_beta": 1.0},
        lambda parameters: _DenseFtrl(parameters, lr=0.5),
    ),
}


@pytest.mark.parametrize("name", ROSENBROCK)
def test_sparse_rosenbrock(name) -> None:
    """(1-x)^2 + 100 (y-x^2)^2, one coordinate's gradient knocked out at random in each step.

    Both get the gradient at the module's point, so that the trajectories can be compared.
    """
    optimizer, given, dense = ROSENBROCK[name]
    module = make_module(optimizer, [(2, 4)], **given)
    exact = torch.zeros(2).double().requires_grad_()
    stepper = dense([exact])
    distances = []
    for _ in range(2000):
        with torch.no_grad():
            point = module(torch.tensor([0, 1]), torch.tensor([0, 1, 2]))[:, 0]
        assert relative_error(point, exact.detach()) <= 1e-5
        x, y = point.double().tolist()
        distances.append(math.hypot(x - 1, y - 1))
        kept = int(torch.randint(0, 2, ()))
        slope = (-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x))[kept]
        output = module(torch.tensor([kept]), torch.tensor([0, 1]))
        output.backward(torch.full_like(output, slope))
        exact.grad = torch.zeros_like(exact)
        exact.grad[kept] = slope
        stepper.step()
    assert distances[-1] < 0.7 * distances[0]
    assert max(distances[1000:]) <= max(distances[:1000])


def test_written_weights_are_not_moved_by_what_came_before() -> None:
    module = make_module(OptimType.ADAM, [(3, 4)], lr=0.1, sparse_mode="dense")
    views = module.split_embedding_weights()[0]
    for row in (0, 1, 1):
        module(torch.tensor([row]), torch.tensor([0, 1])).sum().backward()
    views.copy_(torch.full((3, 4), 5.0))  # as a load does, through views made beforehand
    assert module(torch.tensor([0]), torch.tensor([0, 1]))[0, 0] == 5.0
    module.flush()
    assert torch.equal(module.split_embedding_weights()[0], torch.full((3, 4), 5.0))


def test_reading_weights_wakes_all_rows() -> None:
    module, flushed = _dense_adam(), _dense_adam()
    _train(module, 20)
    _train(flushed, 20)
    flushed.flush()
    assert_same_bits(module.split_embedding_weights(), flushed.split_embedding_weights())
