"""State dicts that do not fit are refused by name before anything is loaded."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks

FTRL, ADAM, ADAGRAD = OptimType.FTRL, OptimType.ADAM, OptimType.EXACT_ADAGRAD


def _sharded(optimizer: Any) -> models.DistributedModelParallel:
    tables = models.BAG_TABLES
    hyperparameters = HYPERPARAMETERS.get(optimizer, {"learning_rate": 0.1})
    model = models.Model(tables, pooled=True)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, **hyperparameters})
    sharded = models.shard(
        model, [sharder], models.plan_for(model, [sharder], "table_wise", tables)
    )
    for batch in models.batches(2):
        sharded(batch.of_rank(0, 1)).backward()
    return sharded


def _states(sharded: models.DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Copies of every local state."""
    return {
        f"{table} {name}": state.clone()
        for table, module in models.modules_by_table(sharded).items()
        for states in module.get_optimizer_state()
        for name, state in states.items()
    }


def _load(written: Any, read: Any, edit: str = "") -> str:
    """The error of loading one optimizer's state dict into another, which changes nothing."""
    source, target = _sharded(written), _sharded(read)
    state_dict = source.fused_optimizer.state_dict()
    key = next(iter(state_dict["state"]))
    if edit == "missing table":
        del state_dict["state"][key]
        state_dict["state"]["other"] = {}
    elif edit == "extra":
        state_dict["state"][key]["t0.extra"] = torch.zeros(3)
    elif edit == "elsewhere":
        states = state_dict["state"][key]
        accum = next(name for name in states if name.endswith(".accum"))
        states[accum] = torch.zeros(states[accum].metadata().size)
    elif edit:
        states = state_dict["state"][key]
        name = next(name for name in states if name.endswith(edit))
        states[name] = torch.zeros(3, 4)
    before = _states(target)
    with pytest.raises(ValueError) as caught:
        target.fused_optimizer.load_state_dict(state_dict)
    after = _states(target)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(caught.value)


@pytest.mark.parametrize(
    "written, read, edit, message",
    [
        (
            FTRL,
            ADAGRAD,
            "",
            r"written with OptimType.FTRL, but the table has OptimType.EXACT_ADAGRAD",
        ),
        (ADAGRAD, FTRL, "", r"written with OptimType.EXACT_ADAGRAD, but the table has"),
        (
            FTRL,
            FTRL,
            "extra",
            r"has the states \['momentum1', 'accum', 'extra'\], but OptimType.FTRL",
        ),
        (FTRL, FTRL, "elsewhere", r"state 'accum' is sharded in another way than here"),
        (
            EmbOptimType.EXACT_ADAGRAD,
            FTRL,
            "",
            r"has the states \['momentum1'\], but OptimType.FTRL",
        ),
        (FTRL, FTRL, "accum", r"state 'accum' has shape \(3, 4\) in the checkpoint, expected"),
        (FTRL, FTRL, "missing table", "has no states under"),
    ],
)
def test_a_misfit_is_named_and_nothing_is_loaded(written, read, edit, message) -> None:
    (found,) = run_on_ranks(1, _load, written, read, edit)
    assert found.startswith("nothing was loaded:\ntable 't")
    assert re.search(message, found), found


def _fbgemms(written: Any, read: Any) -> bool:
    source, target = _sharded(written), _sharded(read)
    target.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    found, expected = (
        [
            state.local_shards()[0].tensor
            for states in sharded.fused_optimizer.state_dict()["state"].values()
            for state in states.values()
            if isinstance(state, ShardedTensor)
        ]
        for sharded in (target, source)
    )
    assert len(found) == len(expected) > 0
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "ours",
    [OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD],
    ids=lambda o: o.name,
)
@pytest.mark.parametrize("into_ours", [True, False])
def test_fbgemms_adagrad_loads_into_ours_and_back(ours, into_ours) -> None:
    pair = (ours.counterpart, ours) if into_ours else (ours, ours.counterpart)
    assert run_on_ranks(1, _fbgemms, *pair) == [True]


def _combined(sharded: models.DistributedModelParallel) -> CombinedOptimizer:
    """The fused optimizer and one of a parameter that is not sharded, with its states."""
    dense = KeyedOptimizerWrapper({"bias": torch.nn.Parameter(torch.zeros(3))}, torch.optim.Adam)
    dense.init_state()
    return CombinedOptimizer([("fused", sharded.fused_optimizer), ("dense", dense)])


def _load_beside_others(edit: str) -> tuple[str, bool]:
    """The error of a load whose other states do not fit, and whether ours are as they were."""
    source, target = _combined(_sharded(FTRL)), _sharded(FTRL)
    combined = _combined(target)
    for optimizer in (source, combined):
        optimizer.save_param_groups(edit == "groups")
    for each in models.modules_by_table(target).values():
        each.reset_optimizer_states()
    state_dict = source.state_dict()
    states = state_dict["state"]["dense.bias"]
    if edit == "missing":
        del states["exp_avg"]
    elif edit == "shape":
        states["exp_avg"] = torch.zeros(2)
    elif edit == "stranger":
        table = state_dict["state"]["fused.ebc.embedding_bags.t0.weight"]
        state_dict["state"]["fused.t9"] = dict(table)
    elif edit == "absent":
        state_dict["state"]["dense.other"] = state_dict["state"].pop("dense.bias")
    else:
        del state_dict["param_groups"][0]["lr"]
    before = _states(target)
    with pytest.raises(ValueError) as caught:
        combined.load_state_dict(state_dict)
    after = _states(target)
    return str(caught.value), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "edit, message",
    [
        ("missing", r"'dense.bias': the checkpoint has the states \['step', 'exp_avg_sq'\]"),
        ("shape", r"'exp_avg' is a Tensor of shape \(2,\) in the checkpoint, expected .*\(3,\)"),
        (
            "stranger",
            r"^parameter 'fused.t9': it is not among those of this optimizer",
        ),
        ("absent", r"'dense.bias': the checkpoint has no states"),
        ("groups", r"param_groups of .*: the checkpoint has \['params'\], the optimizer"),
    ],
)
def test_tables_are_not_loaded_where_other_parameters_do_not_fit(edit, message) -> None:
    ((found, is_unchanged),) = run_on_ranks(1, _load_beside_others, edit)
    assert re.search(message, found, re.MULTILINE)
    assert found.startswith("nothing was loaded:\n")
    assert is_unchanged
