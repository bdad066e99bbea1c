"""The optimizer classes and ``fused_params``: what they take, translate and refuse."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward

import torchrec_ext
from torchrec_ext import optim
from torchrec_ext.distributed import EmbeddingBagCollectionSharder
from torchrec_ext.optimizers import HyperparameterError

from . import models
from .ranks import run_on_ranks
from .test_table_optimizers import parameters_of, shard


@pytest.mark.parametrize("optimizer", ["ftrl", optim.FTRL, "EXACT_SGD"])
def test_a_sharder_takes_no_other_optimizers(optimizer):
    with pytest.raises(TypeError, match="neither a torchrec_ext.OptimType nor"):
        EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})


def test_a_sharder_takes_no_hyperparameters_of_ours_without_an_optimizer():
    with pytest.raises(TypeError, match="l1_reg without an optimizer would be dropped"):
        EmbeddingBagCollectionSharder({"l1_reg": 0.1, "learning_rate": 0.1})
    EmbeddingBagCollectionSharder({"learning_rate": 0.1, "eps": 1e-8})


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_torchs_adam_with_decay_is_not_decoupled_in_silence(decay):
    def warnings_of() -> list[str]:
        model = models.Model()
        keywords = {"lr": 0.1, "weight_decay": decay}
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), keywords)
        sharder = EmbeddingBagCollectionSharder()
        sharding_plan = models.plan_for(model, [sharder], "table_wise")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(AssertionError):  # FBGEMM has no ADAM on the CPU
                models.shard(model, [sharder], sharding_plan)
        return [str(each.message) for each in caught if "torch.optim.Adam" in str(each.message)]

    (found,) = run_on_ranks(1, warnings_of)
    assert len(found) == (3 if decay else 0)
    assert all("torchrec_ext.optim.Adam for torch's coupled decay" in text for text in found)


def test_adam_classes_translate_torchs_keywords():
    def described() -> dict[str, Any]:
        model = models.Model()
        keywords = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.2}
        _apply_optimizer_in_backward(optim.Adam, parameters_of(model, "t0"), keywords)
        _apply_optimizer_in_backward(optim.AdamW, parameters_of(model, "t1"), keywords)
        _apply_optimizer_in_backward(optim.AdamW, parameters_of(model, "t2"), {"lr": 0.1})
        sharded = shard(model, EmbeddingBagCollectionSharder(), models.BAG_TABLES)
        return {
            table: dict(module.hyperparameters)
            for table, module in models.modules_by_table(sharded).items()
        }

    (found,) = run_on_ranks(1, described)
    given = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.2}
    rest = {"bias_correction": "global", "sparse_mode": "lazy"}
    assert found["t0"] == {**given, **rest, "weight_decay_mode": "L2"}
    assert found["t1"] == {**given, **rest, "weight_decay_mode": "DECOUPLE"}
    assert (found["t2"]["weight_decay"], found["t2"]["beta2"]) == (0.01, 0.999)


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("keyword", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_keywords_of_torchs_adam_that_are_not_there_are_refused(cls, keyword):
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(HyperparameterError, match=f"{keyword} is not supported"):
        cls(parameters, **{keyword: True})
    cls(parameters, **{keyword: False})


@pytest.mark.parametrize("cls", optim.classes().values(), ids=lambda cls: cls.__name__)
def test_an_unknown_keyword_is_refused_when_the_class_is_applied(cls):
    model = models.Model()
    with pytest.raises(HyperparameterError, match="beta_one"):
        _apply_optimizer_in_backward(cls, parameters_of(model, "t0"), {"lr": 0.5, "beta_one": 0.9})
    with pytest.raises(HyperparameterError, match="-0.5"):
        _apply_optimizer_in_backward(cls, parameters_of(model, "t0"), {"lr": -0.5})


def test_a_learning_rate_under_two_names_is_refused():
    with pytest.raises(HyperparameterError, match="lr.*learning_rate|learning_rate.*lr"):
        optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, learning_rate=0.2)


def test_a_dict_that_torchrec_wrote_an_optimizer_into_is_refused():
    with pytest.raises(HyperparameterError, match="fresh dict"):
        optim.FTRL([torch.nn.Parameter(torch.zeros(1))], optimizer=EmbOptimType.EXACT_SGD)


def test_an_unsharded_parameter_is_stepped_in_backward():
    weight = torch.nn.Parameter(torch.zeros(4))
    _apply_optimizer_in_backward(optim.FTRL, [weight], {"lr": 0.1, "ftrl_beta": 1.0, "l1_reg": 0.5})
    weight.sum().backward()
    assert torch.allclose(weight.detach(), torch.full((4,), -0.025))


def test_applying_a_class_puts_the_hook_in_place():
    from torchrec_ext.distributed import hook

    torchrec_ext.uninstall()
    optim.FTRL([torch.nn.Parameter(torch.zeros(1))])
    assert hook.in_place()


@pytest.mark.parametrize(
    "cls, given",
    [
        (optim.Adam, {"decoupled_weight_decay": False, "foreach": None}),
        (optim.SGD, {"lr": 0.1, "maximize": False}),
        (optim.Adagrad, {"lr": 0.1, "lr_decay": 0, "weight_decay": 0}),
        (optim.Adam, {"learning_rate": 0.1}),
    ],
)
def test_torchs_keywords_that_are_off_are_taken(cls, given):
    cls([torch.nn.Parameter(torch.zeros(1))], **given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"betas": (0.1, 0.2, 0.3)}, "betas=.*give two numbers"),
        ({"beta1": 0.1}, "has no beta1; give betas"),
        ({"weight_decay_mode": "DECOUPLE"}, "AdamW's DECOUPLE"),
        ({"decoupled_weight_decay": True}, "decoupled_weight_decay is not supported"),
    ],
)
def test_what_adam_refuses(given, message):
    with pytest.raises(HyperparameterError, match=message):
        optim.Adam([torch.nn.Parameter(torch.zeros(1))], **given)


def test_parameter_groups_have_no_settings_of_their_own():
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "betas": (0.1, 0.2)}
    with pytest.raises(HyperparameterError, match="a parameter group sets betas"):
        optim.Adam([group])


def test_adams_learning_rate_is_torchs():
    adam = optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    assert adam.fused_params()["learning_rate"] == 1e-3
