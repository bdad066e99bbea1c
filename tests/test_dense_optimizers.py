"""The optimizer classes on plain parameters: the same updates as the fused ones."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchrec_ext import OptimType, optim
from torchrec_ext.optimizers import HyperparameterError

from . import reference
from .modules import (
    HYPERPARAMETERS,
    fill,
    make_module,
    relative_error,
    snapshot,
)

CLASSES = optim.classes()
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)


def _optimizer(kind: OptimType, parameters: Any, **hyperparameters: Any) -> optim.FusedOptimizer:
    """By the names that tables take; Adam's class has torch's."""
    values = {**HYPERPARAMETERS[kind], **hyperparameters}
    if kind == OptimType.ADAM:
        values["betas"] = (values.pop("beta1", 0.9), values.pop("beta2", 0.999))
    return CLASSES[kind](parameters, **values)


def _states(optimizer: optim.FusedOptimizer, parameter: Tensor) -> list[Tensor]:
    return [state for name, state in optimizer.state[parameter].items() if name != "step"]


@OPTIMIZERS
@pytest.mark.parametrize("shape", [(7, 20), (5, 3), (4, 2, 3)])
def test_dense_gradients_equal_the_float64_reference(optimizer, shape) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    opt = _optimizer(optimizer, [parameter])
    rows = shape[0]
    expected = parameter.detach().double().view(rows, -1).clone()
    for step in range(1, 6):
        gradient = torch.randn(shape)
        parameter.grad = gradient.clone()
        if step == 1:
            opt.step()
            first = [state.clone() for state in _states(opt, parameter)]
            states = [torch.zeros_like(s, dtype=torch.float64).view(rows, -1) for s in first]
            states = [
                s.squeeze(-1) if f.dim() == 1 else s for s, f in zip(states, first, strict=True)
            ]
        else:
            opt.step()
        expected = reference.UPDATES[optimizer.name](
            expected, gradient.double().view(rows, -1), states, step, **HYPERPARAMETERS[optimizer]
        )
        assert relative_error(parameter.detach().view(rows, -1), expected) <= 2e-5
        for found, each in zip(_states(opt, parameter), states, strict=True):
            assert found.dtype == torch.float32
            assert relative_error(found.view(each.shape), each) <= 2e-5


@OPTIMIZERS
def test_sparse_gradients_give_the_bits_of_a_fused_table(optimizer) -> None:
    table = nn.Embedding(9, 8, sparse=True)
    module = make_module(optimizer, [(9, 8)], "none", **HYPERPARAMETERS[optimizer])
    fill(module, [table.weight.detach()])
    opt = _optimizer(optimizer, table.parameters())
    for _ in range(4):
        rows = torch.randperm(9)[:4]  # each once: torch sums duplicates in an order of its own
        gradient = torch.randn(4, 8)
        opt.zero_grad()
        table(rows).backward(gradient)
        opt.step()
        module(rows, torch.arange(5)).backward(gradient)
    found = [table.weight.detach(), *_states(opt, table.weight)]
    for mine, fused in zip(found, snapshot(module), strict=True):
        assert torch.equal(mine, fused)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (
            lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        ),
        (lambda p: optim.AdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
        (lambda p: optim.Adagrad(p, lr=0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
    ids=["Adam", "AdamW", "SGD", "Adagrad"],
)
def test_a_dense_model_trains_as_with_torchs(ours, theirs) -> None:
    models = [nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))]
    models.append(copy.deepcopy(models[0]))
    optimizers = [ours(models[0].parameters()), theirs(models[1].parameters())]
    for _ in range(50):
        inputs = torch.randn(16, 5)
        for model, opt in zip(models, optimizers, strict=True):
            opt.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            opt.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert relative_error(mine.detach(), other.detach()) <= 1e-5


def test_ftrl_zeroes_weights_exactly() -> None:
    parameter = nn.Parameter(torch.zeros(10, 4))
    opt = optim.FTRL([parameter], lr=0.1, ftrl_beta=1.0, l1_reg=1.0)
    parameter.grad = torch.randn(10, 4)
    opt.step()
    within = opt.state[parameter]["linear"].abs() <= 1.0
    assert within.any() and not within.all()
    assert torch.equal(parameter.detach() == 0.0, within)


@OPTIMIZERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_dict_round_trip_goes_on_bit_for_bit(optimizer, dtype) -> None:
    parameter = nn.Parameter(torch.randn(6, 8).to(dtype))
    opt = _optimizer(optimizer, [parameter])
    gradients = [torch.randn(6, 8).to(dtype) for _ in range(4)]
    for gradient in gradients[:2]:
        parameter.grad = gradient
        opt.step()
    saved = io.BytesIO()
    torch.save(opt.state_dict(), saved)
    saved.seek(0)
    other = nn.Parameter(parameter.detach().clone())
    loaded = _optimizer(optimizer, [other], learning_rate=0.7)
    loaded.load_state_dict(torch.load(saved))
    for gradient in gradients[2:]:
        for each, its in ((parameter, opt), (other, loaded)):
            each.grad = gradient
            its.step()
    assert torch.equal(parameter, other)
    for mine, its in zip(_states(opt, parameter), _states(loaded, other), strict=True):
        assert its.dtype == torch.float32
        assert torch.equal(mine, its)


def test_groups_schedules_and_closures() -> None:
    first, second = (nn.Parameter(torch.zeros(1, 4)) for _ in range(2))
    opt = optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = first.sum() + second.sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 0.0
    schedule.step()
    opt.step(closure)
    assert first[0, 0] == -1.5 and second[0, 0] == -0.75


def test_parameters_without_a_gradient_stay() -> None:
    used, unused = (nn.Parameter(torch.ones(2, 4)) for _ in range(2))
    opt = optim.Adam([used, unused])
    used.sum().backward()
    opt.step()
    assert torch.equal(unused.detach(), torch.ones(2, 4)) and unused not in opt.state


def test_transposed_parameters_are_updated_in_place() -> None:
    base = torch.zeros(4, 3)
    parameter = nn.Parameter(base.t())
    opt = optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.arange(12.0).view(3, 4)
    opt.step()
    assert torch.equal(base.t(), -torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), ()])
def test_empty_parameters_and_scalars(shape) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    opt = optim.SGD([parameter], lr=0.25)
    parameter.grad = torch.ones(shape)
    opt.step()
    assert torch.equal(parameter.detach(), torch.full(shape, 0.75))


def test_what_is_refused() -> None:
    double = nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    with pytest.raises(ValueError, match="dtype torch.float64"):
        optim.FTRL([double]).step()
    table = nn.Embedding(3, 4, sparse=True)
    dense_mode = optim.Adam(table.parameters(), sparse_mode="dense")
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(ValueError, match="sparse_mode='dense' with a sparse gradient"):
        dense_mode.step()
    good = optim.FTRL(table.parameters(), lr=0.1)
    good.param_groups[0]["lr"] = 0.0
    with pytest.raises(HyperparameterError, match="learning_rate"):
        good.step()
    assert torch.equal(table.weight.detach(), before)


def test_another_optimizers_state_dict_is_refused_before_anything_changes() -> None:
    parameter = nn.Parameter(torch.ones(2, 4))
    parameter.grad = torch.ones(2, 4)
    adagrad, ftrl = optim.Adagrad([parameter], lr=0.1), optim.FTRL([parameter], lr=0.1)
    adagrad.step()
    ftrl.step()
    before = copy.deepcopy(ftrl.state_dict())
    with pytest.raises(
        ValueError, match=r"FTRL: the states of parameter 0.*'sum'.*expected.*'linear'"
    ):
        ftrl.load_state_dict(adagrad.state_dict())
    adam, adamw = optim.Adam([parameter]), optim.AdamW([parameter])
    with pytest.raises(ValueError, match="weight decay is DECOUPLE, this class's L2"):
        adam.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="has no ftrl_beta"):
        ftrl.load_state_dict(optim.SGD([parameter], lr=0.1).state_dict())
    narrow = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        optim.FTRL([narrow], lr=0.1).load_state_dict(before)
    after = ftrl.state_dict()
    for name, value in before["state"][0].items():
        assert torch.equal(value, after["state"][0][name])


def test_all_parameters_are_checked_before_one_is_updated() -> None:
    good = nn.Parameter(torch.zeros(2, 4))
    bad = nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))
    opt = optim.FTRL([good, bad], lr=0.1)
    for each in (good, bad):
        each.grad = torch.ones_like(each)
    with pytest.raises(ValueError, match="float64"):
        opt.step()
    assert good.detach().count_nonzero() == 0 and good not in opt.state


def test_a_step_between_forward_and_backward_is_seen_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    opt = optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2, 4)
    loss = (weight * weight).sum()
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_groups_with_names_and_with_unknown_settings() -> None:
    layer = nn.Linear(4, 4)
    opt = optim.FTRL(layer.named_parameters(), lr=0.1)
    with pytest.raises(HyperparameterError, match="weight_decai"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "weight_decai": 0.1})
    assert len(opt.param_groups) == 1


def test_momentum_cannot_be_switched_on_after_the_first_step() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    opt = optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2, 4)
    opt.step()
    opt.param_groups[0]["momentum"] = 0.9
    before = weight.detach().clone()
    with pytest.raises(ValueError, match="momentum_buffer"):
        opt.step()
    assert torch.equal(weight.detach(), before)
