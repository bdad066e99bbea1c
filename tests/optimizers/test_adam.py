"""ADAM: worked numbers, torch's optimizers, and what it refuses."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    UserEnabledConfigDefinition,
    WeightDecayMode,
)

from torchrec_ext import OptimType
from torchrec_ext.optimizers import HyperparameterError

from ..modules import fill, make_module, relative_error, single_step


def _module(weight: float = 1.0, rows: int = 3, **hyperparameters: Any):
    module = make_module(OptimType.ADAM, [(rows, 4)], **{"lr": 0.1, **hyperparameters})
    module.split_embedding_weights()[0].fill_(weight)
    return module


def _states(module, row: int = 0) -> list[float]:
    return [float(state[row].flatten()[0]) for state in module.split_optimizer_states()[0]]


@pytest.mark.parametrize(
    "mode, rate, expected",
    [
        (WeightDecayMode.DECOUPLE, 0.1, 0.890),
        (WeightDecayMode.L2, 0.1, 0.900),
        ("DECOUPLE", 0.5, 0.25),
        ("L2", 0.5, 0.50),
    ],
)
def test_the_decay_is_taken_from_the_previous_weight(mode, rate, expected) -> None:
    module = _module(lr=rate, weight_decay=rate, weight_decay_mode=mode)
    assert single_step(module, 1.0) == pytest.approx(expected, abs=1e-6)


def test_l2_enters_both_moments() -> None:
    module = _module(weight_decay=0.1, weight_decay_mode="L2")
    single_step(module, 1.0)
    assert _states(module) == pytest.approx([0.11, 0.00121], rel=1e-5)


def test_decoupled_decay_is_the_default() -> None:
    assert single_step(_module(weight_decay=0.1), 1.0) == pytest.approx(0.890, abs=1e-6)


def test_a_row_that_is_touched_without_gradient_moves_on() -> None:
    module = _module()
    assert single_step(module, 1.0) == pytest.approx(0.9, abs=1e-6)
    assert single_step(module, 0.0) == pytest.approx(0.83299, abs=1e-5)


@pytest.mark.parametrize(
    "bias_correction, sparse_mode, expected",
    [
        ("global", "lazy", 0.81415),
        ("per_row", "lazy", 0.80000),
        ("global", "dense", 0.75119),
    ],
)
def test_a_row_that_misses_a_step(bias_correction, sparse_mode, expected) -> None:
    module = _module(bias_correction=bias_correction, sparse_mode=sparse_mode)
    single_step(module, 1.0, row=0)
    single_step(module, 1.0, row=1)
    assert single_step(module, 1.0, row=0) == pytest.approx(expected, abs=1e-5)
    if bias_correction == "per_row":
        counts = module.split_optimizer_states()[0][2]
        assert counts.tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("sparse_mode, expected", [("lazy", 0.9801), ("dense", 0.970299)])
def test_how_far_decay_reaches(sparse_mode, expected) -> None:
    module = _module(weight_decay=0.1, sparse_mode=sparse_mode)
    for row in (0, 1, 0):
        weight = single_step(module, 0.0, row=row)
    assert weight == pytest.approx(expected, abs=1e-6)


def _torch_optimizer(weight: torch.Tensor, mode: str, lr: float, decay: float):
    kinds = {"DECOUPLE": torch.optim.AdamW, "L2": torch.optim.Adam}
    return kinds[mode]([weight], lr=lr, weight_decay=decay, eps=1e-8)


@pytest.mark.parametrize("mode", ["DECOUPLE", "L2"])
@pytest.mark.parametrize("lr", [1e-3, 0.1])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.1])
def test_equals_torchs_adam_and_adamw(mode, lr, decay) -> None:
    rows, dim = 20, 8
    module = make_module(
        OptimType.ADAM, [(rows, dim)], lr=lr, weight_decay=decay, weight_decay_mode=mode
    )
    start = torch.randn(rows, dim)
    fill(module, [start])
    exact = start.double().requires_grad_()
    optimizer = _torch_optimizer(exact, mode, lr, decay)
    for _ in range(50):
        gradient = torch.randn(rows, dim)
        module(torch.arange(rows), torch.arange(rows + 1)).backward(gradient)
        exact.grad = gradient.double()
        optimizer.step()
        assert relative_error(module.split_embedding_weights()[0], exact.detach()) <= 1e-5


@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_equals_torchs_sparse_adam(lr) -> None:
    # SparseAdam adds eps before the bias correction, Adam after it: a small eps hides that.
    module = make_module(OptimType.ADAM, [(20, 8)], lr=lr, eps=1e-12)
    start = torch.randn(20, 8)
    fill(module, [start])
    bag = torch.nn.EmbeddingBag(20, 8, mode="sum", sparse=True).double()
    bag.weight.data.copy_(start)
    optimizer = torch.optim.SparseAdam(bag.parameters(), lr=lr, eps=1e-12)
    offsets = torch.arange(0, 13, 3)
    for _ in range(50):
        indices = torch.randint(0, 20, (12,))
        gradient = torch.randn(4, 8)
        module(indices, offsets).backward(gradient)
        optimizer.zero_grad()
        bag(indices, offsets[:-1]).backward(gradient.double())
        optimizer.step()
        assert relative_error(module.split_embedding_weights()[0], bag.weight.detach()) <= 1e-5


def test_initial_accumulator_value_is_ignored_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="ADAM ignores initial_accumulator_value=0.5") as caught:
        module = _module(initial_accumulator_value=0.5)
    assert len(caught) == 1
    assert _states(module) == [0.0, 0.0]


def test_fbgemms_config_chooses_the_bias_correction() -> None:
    config = UserEnabledConfigDefinition(use_rowwise_bias_correction=True)
    assert _module(extra_optimizer_config=config).hyperparameters["bias_correction"] == "per_row"
    config = UserEnabledConfigDefinition()
    assert _module(extra_optimizer_config=config).hyperparameters["bias_correction"] == "global"
    with pytest.raises(HyperparameterError, match="sets use_writeback_bwd_prehook"):
        others = SimpleNamespace(use_rowwise_bias_correction=False, use_writeback_bwd_prehook=True)
        _module(extra_optimizer_config=others)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight_decay_mode": WeightDecayMode.COUNTER}, "weight_decay_mode=.*one of NONE, L2"),
    ({"weight_decay": 0.1, "weight_decay_mode": "NONE"}, "weight_decay=0.1 has no effect"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ({"beta1": 1.0}, "beta1=1.0 .* < 1"),
    ({"beta2": 1.0}, "beta2=1.0 .* < 1"),
    ({"eps": -1e-8}, "eps=-1e-08"),
    ({"bias_correction": "row"}, "bias_correction='row' .*one of global, per_row"),
    ({"sparse_mode": "eager"}, "sparse_mode='eager' .*one of lazy, dense"),
    ({"sparse_mode": "dense", "weight_decay": 0.1, "weight_decay_mode": "L2"}, "its own moments"),
    ({"sparse_mode": "dense", "bias_correction": "per_row"}, "that touch a row"),
    ({"sparse_mode": "dense", "beta1": 0.9996}, r"beta1=0.9996 >= sqrt\(beta2\)"),
    ({"sparse_mode": "dense", "beta2": 0.85}, "beta1=0.9 >= beta2=0.85.*eps"),
    ({"extra_optimizer_config": {}}, "UserEnabledConfigDefinition"),
    (
        {
            "extra_optimizer_config": UserEnabledConfigDefinition(use_rowwise_bias_correction=True),
            "bias_correction": "global",
        },
        "contradicts extra_optimizer_config",
    ),
    ({"sparse_mode": "dense", "weight_decay": 10.0}, "learning_rate \\* weight_decay = 1.0"),
    ({"l1_reg": 0.1}, "ADAM has no hyperparameter 'l1_reg'"),
    ({"momentum": 0.1}, "ADAM has no hyperparameter 'momentum'"),
]


@pytest.mark.parametrize("given, message", BAD, ids=[str(bad[0]) for bad in BAD])
def test_what_is_refused(given, message) -> None:
    with pytest.raises(HyperparameterError, match=message):
        _module(**given)


def test_what_a_built_module_cannot_change() -> None:
    module = _module()
    for change in ({"bias_correction": "per_row"}, {"sparse_mode": "dense"}):
        with pytest.raises(HyperparameterError, match="build a new one"):
            module.update_hyper_parameters(change)
    assert single_step(module, 1.0) == pytest.approx(0.9, abs=1e-6)


def test_counterpart_and_value() -> None:
    assert OptimType.ADAM.value == "adam"
    assert OptimType.ADAM.counterpart is EmbOptimType.ADAM


def test_nothing_warns_without_cause() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _module(weight_decay=0.1)
