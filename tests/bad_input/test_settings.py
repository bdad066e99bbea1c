"""Settings that no module can be built with, on one rank and on all that share a model."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torchrec import PoolingType

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder
from torchrec_ext.optim import FTRL
from torchrec_ext.optimizers import HyperparameterError

from ..distributed import models
from ..distributed.ranks import run_on_ranks
from ..modules import make_module
from .harness import build

TABLES = (
    models.Table("user", 7, 8, ("f0",)),
    models.Table("item", 5, 8, ("f1",), PoolingType.MEAN),
)
GOOD = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}

# Group, what replaces or joins good settings, what the error says. The errors are those of a module
# as well as of a sharded model, which names the same tables.
SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("hyperparameter out of range", {"learning_rate": 0.0}, "learning_rate=0.0 .* eta_min"),
    ("hyperparameter out of range", {"l1_reg": -1.0}, "FTRL: l1_reg=-1.0 is not legal; .* >= 0"),
    ("hyperparameter out of range", {"l2_reg": math.nan}, "FTRL: l2_reg=nan is not legal"),
    ("hyperparameter out of range", {"ftrl_beta": math.inf}, "FTRL: ftrl_beta=inf is not legal"),
    ("hyperparameter out of range", {"learning_rate_power": 0.5}, "learning_rate_power=0.5 .*<= 0"),
    ("hyperparameter that is no number", {"l1_reg": "0.1"}, "FTRL: l1_reg='0.1' is not legal"),
    ("hyperparameter that is no number", {"l1_reg": True}, "FTRL: l1_reg=True is not legal"),
    ("hyperparameter that is no number", {"l1_reg": None}, "FTRL: l1_reg=None is not legal"),
    ("hyperparameter that is no number", {"l1_reg": [0.1]}, r"FTRL: l1_reg=\[0.1\] is not legal"),
    ("hyperparameter of another optimizer", {"weight_decay": 0.1}, "FTRL has no .*'weight_decay'"),
    ("hyperparameter of another optimizer", {"beta1": 0.9}, "FTRL has no hyperparameter 'beta1'"),
    ("hyperparameter under two names", {"lr": 0.2}, "learning_rate and lr are two names of the sa"),
    ("misspelt keyword", {"learning_rte": 0.1}, "learning_rte=0.1 is neither .* which has ftrl_b"),
    ("misspelt keyword", {"drop_bad_indexes": True}, "drop_bad_indexes=True is neither a keyword"),
    ("keyword of another type", {"bounds_check_mode": "FATAL"}, "'FATAL' is .*one of FATAL, WARN"),
    ("keyword of another type", {"bounds_check_mode": 2}, "bounds_check_mode=2 is .*a BoundsChec"),
    ("keyword of another type", {"output_dtype": "fp16"}, "output_dtype='fp16' is .*one of .*FP16"),
    (
        "keyword of another type",
        {"stochastic_rounding": "no"},
        "_rounding='no' .*True or",
    ),
    ("keyword of another type", {"uvm_host_mapped": 1}, "uvm_host_mapped=1 .*True or False"),
    ("keyword of another type", {"cache_sets": True}, "cache_sets=True is not legal; .*an? int"),
    ("drop_bad_indices", {"drop_bad_indices": 1}, "drop_bad_indices=1 .* True or False"),
    ("rounding_seed", {"rounding_seed": "a"}, "rounding_seed='a' .* an integer of 64 bits"),
    ("rounding_seed", {"rounding_seed": 2**63}, f"rounding_seed={2**63} .* an integer of 64 bits"),
    ("gradient clipping", {"gradient_clipping": 1}, "gradient_clipping=1 .* True or False"),
    ("gradient clipping", {"max_gradient": 1.0}, "max_gradient=1.0 has no effect without"),
    (
        "gradient clipping",
        {"gradient_clipping": True, "max_gradient": math.nan},
        "max_gradient=nan is not legal; it must be a number >= 0",
    ),
]
# Settings that a module has and fused_params may not, and what only fused_params can get wrong.
FUSED_PARAMS: list[tuple[str, dict[str, Any], str]] = [
    (
        "keyword that the plan sets",
        {"pooling_mode": PoolingMode.SUM},
        "comes from the table's",
    ),
    (
        "keyword that the plan sets",
        {"device": "cpu"},
        "device='cpu' comes from the t.*leave",
    ),
    ("keyword that the plan sets", {"table_names": ["a"]}, r"table_names=\['a'\] comes from"),
    ("value that cannot be compared", {"res_params": {}}, r"res_params=\{\} is not hashable"),
    (
        "keyword of ours, optimizer of FBGEMM's",
        {"optimizer": EmbOptimType.EXACT_SGD, "rounding_seed": 1},
        "rounding_seed=1 is a keyword of torchrec_ext, but",
    ),
]


def _id(value: Any) -> str:
    return f"{next(iter(value))}" if isinstance(value, dict) else ""


@pytest.mark.parametrize(("group", "settings", "message"), SETTINGS, ids=_id)
def test_module(group, settings, message) -> None:
    with pytest.raises((HyperparameterError, ValueError, TypeError), match=message) as raised:
        build(**{"learning_rate": 0.1, **settings})
    assert "neither" in message or r"['user', 'item']" in str(raised.value), "names the tables"


def _shard(settings: dict[str, Any]) -> str:
    sharder = EmbeddingBagCollectionSharder({**GOOD, **settings})
    model = models.Model(TABLES)
    plan = models.plan_for(model, [sharder], "table_wise", TABLES)
    try:
        models.shard(model, [sharder], plan)
    except HyperparameterError as error:
        return str(error)
    return "built"


@functools.cache
def _answers() -> list[list[str]]:
    """Of every rank to every setting; the third rank gets no table."""
    settings = [given for _, given, _ in SETTINGS + FUSED_PARAMS]
    return run_on_ranks(3, lambda: [_shard(given) for given in settings])


@pytest.mark.parametrize("number", range(len(SETTINGS + FUSED_PARAMS)))
def test_fused_params_on_every_rank(number) -> None:
    _, _, message = (SETTINGS + FUSED_PARAMS)[number]
    for answers in _answers():
        with pytest.raises(HyperparameterError, match=message):
            raise HyperparameterError(answers[number])
        assert answers[number].startswith("tables ['user', 'item']: ")


@pytest.mark.parametrize("optimizer", ["ftrl", FTRL, 3], ids=str)
def test_an_optimizer_that_is_none(optimizer) -> None:
    with pytest.raises(TypeError, match="fused_params: optimizer=.* is neither a .*OptimType.FTRL"):
        EmbeddingBagCollectionSharder({"optimizer": optimizer})
    with pytest.raises(TypeError, match="is not a torchrec_ext.OptimType"):
        make_module(optimizer, [(3, 4)])


def test_hyperparameters_without_an_optimizer() -> None:
    with pytest.raises(TypeError, match="l1_reg without an optimizer would be dropped; add"):
        EmbeddingBagCollectionSharder({"l1_reg": 0.1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate=-1.0 is not legal"),
        ({"l1_reg": math.nan}, "l1_reg=nan is not legal"),
        ({"eps": 0.1}, "FTRL has no hyperparameter 'eps'"),
        ({"learning_rate": torch.tensor(0.1)}, "learning_rate=tensor"),
    ],
    ids=_id,
)
def test_a_change_that_is_refused_changes_nothing(change, message) -> None:
    module = build()
    before = dict(module.hyperparameters)
    with pytest.raises(HyperparameterError, match=rf"\['user', 'item'\]: .*{message}"):
        module.update_hyper_parameters({"l2_reg": 0.5, **change})
    assert module.hyperparameters == before


@pytest.mark.parametrize("step", [-1, 1.0, "3", True, 2**31])
def test_a_step_that_is_none(step) -> None:
    module = build()
    with pytest.raises(ValueError, match=r"\['user', 'item'\]: step=.* an integer >= 0"):
        module.set_optimizer_step(step)
    assert int(module.iter) == 0


GROUPS = (
    *dict.fromkeys(group for group, _, _ in SETTINGS + FUSED_PARAMS),
    "optimizer that is none",
    "hyperparameters without an optimizer",
    "hyperparameters changed later",
    "optimizer step",
)
