"""EXACT_SGD: the clipping lines of the definition, and momentum as torch has it."""

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.optimizers import HyperparameterError

from ..modules import fill, make_module, relative_error, single_step


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


MOMENTUM = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.5, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"weight_decay": 0.1},
]


@pytest.mark.parametrize("given", MOMENTUM, ids=str)
def test_equals_torchs_sgd_where_every_row_is_touched(given) -> None:
    module = make_module(OptimType.EXACT_SGD, [(20, 8)], lr=0.1, **given)
    start = torch.randn(20, 8)
    fill(module, [start])
    exact = start.double().requires_grad_()
    keywords = {name: value for name, value in given.items() if name != "weight_decay"}
    optimizer = torch.optim.SGD([exact], lr=0.1, **keywords)
    for _ in range(50):
        gradient = torch.randn(20, 8)
        module(torch.arange(20), torch.arange(21)).backward(gradient)
        exact.grad = gradient.double()
        with torch.no_grad():  # torch's own decay is not decoupled
            exact *= 1 - 0.1 * given.get("weight_decay", 0.0)
        optimizer.step()
        assert relative_error(module.split_embedding_weights()[0], exact.detach()) <= 1e-5


@pytest.mark.parametrize(
    "given, message",
    [
        ({"nesterov": True}, "nesterov=True.*momentum > 0"),
        ({"dampening": 0.5}, "dampening=0.5.*momentum > 0"),
        ({"momentum": 0.9, "dampening": 0.5, "nesterov": True}, "dampening=0.5.*nesterov"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": 0.9, "nesterov": 1}, "nesterov=1 .*True or False"),
    ],
)
def test_what_is_refused(given, message) -> None:
    with pytest.raises(HyperparameterError, match=message):
        make_module(OptimType.EXACT_SGD, [(3, 4)], **given)


def test_momentum_cannot_come_or_go_in_a_built_module() -> None:
    plain = make_module(OptimType.EXACT_SGD, [(3, 4)])
    with pytest.raises(HyperparameterError, match="other optimizer states.*build a new one"):
        plain.update_hyper_parameters({"momentum": 0.9})
    heavy = make_module(OptimType.EXACT_SGD, [(3, 4)], momentum=0.9)
    with pytest.raises(HyperparameterError, match="build a new one"):
        heavy.update_hyper_parameters({"momentum": 0.0})
    heavy.update_hyper_parameters({"momentum": 0.5})
