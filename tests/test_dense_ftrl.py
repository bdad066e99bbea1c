"""torchrec_ext.optim.FTRL with its extensions on plain parameters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from torchrec_ext import OptimType, optim
from torchrec_ext.optimizers import HyperparameterError

from . import reference
from .modules import fill, make_module, of_update, relative_error, snapshot
from .optimizers.test_ftrl_extensions import BASE, COMBINATIONS

combinations = pytest.mark.parametrize("combination", COMBINATIONS, ids="+".join)
SCHEDULED = (0.1, 0.05, 0.2)


@combinations
@pytest.mark.parametrize("shape", [(7, 20), (5,), (4, 2, 3)], ids=str)
def test_every_combination_equals_float64(combination, shape) -> None:
    given = {**BASE, **combination}
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = optim.FTRL([parameter], **given)
    rows = shape[0] if len(shape) > 1 else 1
    expected = parameter.detach().double().view(rows, -1).clone()
    sign = -0.0 if "preserve_initial_weight" in combination else 0.0
    states = [torch.full_like(expected, sign), torch.full_like(expected, 0.1)]
    for step, rate in enumerate(SCHEDULED, start=1):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.randn(shape)
        optimizer.step()
        values = {**of_update(given), "learning_rate": rate}
        gradient = parameter.grad.double().view(rows, -1)
        expected = reference.ftrl(expected, gradient, states, step, **values)
        assert relative_error(parameter.detach().view(rows, -1), expected) <= 2e-5
        found = optimizer.state[parameter]
        for name, state in zip(("linear", "accum"), states, strict=True):
            assert relative_error(found[name].view(rows, -1), state) <= 2e-5


@combinations
def test_sparse_gradients_give_the_bits_of_a_fused_table(combination) -> None:
    given = {"learning_rate": 0.1, **BASE, **combination}
    table = nn.Embedding(9, 8, sparse=True)
    module = make_module(OptimType.FTRL, [(9, 8)], "none", **given)
    fill(module, [table.weight.detach()])
    optimizer = optim.FTRL(table.parameters(), **given)
    for rate in SCHEDULED:
        rows, gradient = torch.randperm(9)[:4], torch.randn(4, 8)
        optimizer.param_groups[0]["lr"] = rate
        module.set_learning_rate(rate)
        optimizer.zero_grad()
        table(rows).backward(gradient)
        optimizer.step()
        module(rows, torch.arange(5)).backward(gradient)
    states = optimizer.state[table.weight]
    found = [table.weight.detach(), states["linear"], states["accum"]]
    for mine, fused in zip(found, snapshot(module), strict=True):
        assert torch.equal(mine, fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_a_gradient_keep_their_initial_weight_through_a_state_dict(dtype) -> None:
    start = torch.randn(4, 8).to(dtype)

    def build() -> tuple[nn.Parameter, optim.FTRL]:
        parameter = nn.Parameter(start.clone())
        given = {"ftrl_beta": 1.0, "l1_reg": 0.5, "preserve_initial_weight": True}
        return parameter, optim.FTRL([parameter], lr=0.1, **given)

    def update(parameter: nn.Parameter, optimizer: optim.FTRL, row: int) -> None:
        indices, values = torch.tensor([[row]]), torch.zeros(1, 8, dtype=dtype)
        parameter.grad = torch.sparse_coo_tensor(indices, values, (4, 8))
        optimizer.step()

    parameter, optimizer = build()
    update(parameter, optimizer, 0)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    other, loaded = build()
    loaded.load_state_dict(torch.load(saved))
    for group in loaded.param_groups:
        group["lr"] = 0.01
    update(other, loaded, 1)
    assert relative_error(other.detach(), start) <= (1e-3 if dtype == torch.float16 else 1e-6)
    marks = loaded.state[other]["linear"]
    assert ((marks == 0.0) & marks.signbit()).all(1).tolist() == [False, False, True, True]


def _stepped() -> tuple[nn.Parameter, optim.FTRL]:
    parameter = nn.Parameter(torch.ones(2, 4))
    optimizer = optim.FTRL([parameter], lr=0.1, ftrl_beta=1.0)
    parameter.grad = torch.ones(2, 4)
    optimizer.step()
    return parameter, optimizer


def _copied(optimizer: optim.FTRL) -> optim.FTRL:
    return copy.deepcopy(optimizer)


def _reloaded(optimizer: optim.FTRL) -> optim.FTRL:
    other = optim.FTRL([nn.Parameter(torch.ones(2, 4))], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    return other


@pytest.mark.parametrize("name", ["preserve_initial_weight", "multiply_linear_by_lr"])
@pytest.mark.parametrize("come_by", [lambda optimizer: optimizer, _copied, _reloaded])
def test_what_gives_linear_its_meaning_cannot_change_after_the_first_step(name, come_by) -> None:
    optimizer: Any = come_by(_stepped()[1])
    (parameter,) = optimizer.param_groups[0]["params"]
    before = parameter.detach().clone()
    parameter.grad = torch.ones(2, 4)
    optimizer.param_groups[0][name] = True
    with pytest.raises(HyperparameterError, match=rf"{name}=True cannot replace False.*\(2, 4\)"):
        optimizer.step()
    assert torch.equal(parameter.detach(), before)
    optimizer.param_groups[0][name] = False
    optimizer.step()
    assert not torch.equal(parameter.detach(), before)


def test_it_can_be_set_before_the_first_step_and_comes_with_a_load() -> None:
    parameter = nn.Parameter(torch.ones(2, 4))
    optimizer = optim.FTRL([parameter], lr=0.1, ftrl_beta=1.0)
    optimizer.param_groups[0]["preserve_initial_weight"] = True
    parameter.grad = torch.zeros(2, 4)
    optimizer.step()
    assert relative_error(parameter.detach(), torch.ones(2, 4)) <= 1e-6
    other, plain = _stepped()
    plain.load_state_dict(optimizer.state_dict())
    other.grad = torch.zeros(2, 4)
    plain.step()
    assert plain.param_groups[0]["preserve_initial_weight"] is True
