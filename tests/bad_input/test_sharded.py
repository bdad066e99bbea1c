"""Plans, batches and checkpoints that a sharded model cannot take."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints, Topology

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.distributed.planner import EmbeddingShardingPlanner

from ..distributed import models
from ..distributed.ranks import run_on_ranks

ADAM = {"optimizer": OptimType.ADAM, "learning_rate": 0.1}
FTRL = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}
POOLED = (models.Table("user", 7, 8, ("f0",)), models.Table("item", 5, 8, ("f1",)))


def _model(pooled: bool = True, fused_params: dict[str, Any] = ADAM) -> Any:
    sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder, model = sharder_type(fused_params), models.Model(POOLED, pooled)
    plan = models.plan_for(model, [sharder], "table_wise", POOLED)
    sharded = models.shard(model, [sharder], plan)
    models.write_weights(sharded, models.initial_weights(POOLED))
    return sharded


def _content(sharded: Any) -> list[torch.Tensor]:
    parts = [models.read_weights(sharded), models.read_states(sharded)]
    return [tensor for part in parts for shards in part.values() for _, tensor in shards]


def _refusal(sharded: Any, call: Callable[[], Any]) -> str:
    """The error, after a check that nothing was changed by the call."""
    before, steps = _content(sharded), models.read_steps(sharded)
    try:
        call()
    except Exception as error:  # noqa: BLE001  (which one is for the test)
        after = _content(sharded)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert models.read_steps(sharded) == steps
        return f"{type(error).__name__}: {error}"
    return "accepted"


CONSTRAINTS = {
    "data_parallel": "No available sharding type and compute kernel combination .* for user",
    "rowwise": "No available sharding type and compute kernel combination .* for user",
}


@pytest.mark.parametrize(("sharding_type", "message"), CONSTRAINTS.items())
def test_a_planner_that_finds_no_plan_says_so_on_every_rank(sharding_type, message):
    def plan() -> str:
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=2, compute_device="cpu"),
            constraints={"user": ParameterConstraints(sharding_types=[sharding_type])},
            debug=False,
        )
        try:
            planner.collective_plan(models.Model(POOLED), [EmbeddingBagCollectionSharder(ADAM)])
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return "planned"

    for answer in run_on_ranks(2, plan):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(answer)


def test_a_plan_that_drops_the_optimizer_is_refused_on_every_rank():
    def shard() -> str:
        sharder, model = EmbeddingBagCollectionSharder(ADAM), models.Model(POOLED)
        plan = copy.deepcopy(models.plan_for(model, [sharder], "table_wise", POOLED))
        for sharding in next(iter(plan.plan.values())).values():
            sharding.compute_kernel = "dense"
        try:
            models.shard(model, [sharder], plan)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return "sharded"

    for answer in run_on_ranks(2, shard):
        assert answer.startswith("PlanError: table 'user': ") and "ParameterConstraints" in answer


def _batch(**changes: Any) -> KeyedJaggedTensor:
    good = {
        "keys": ["f0", "f1"],
        "values": torch.tensor([1, 2, 3]),
        "lengths": torch.tensor([2, 1]),
    }
    return KeyedJaggedTensor(**{**good, **changes})


MISFIT = "ValueError: Sum of lengths must equal|RuntimeError: split_with_sizes expects"
BATCHES = {
    "float": (
        {"values": torch.tensor([1.0, 2.7, 3.0])},
        "TypeError: features .* torch.float32",
    ),
    "int16": (
        {"values": torch.tensor([1, 2, 3]).short()},
        "TypeError: .*int16, expected",
    ),
    "missing": (
        {"keys": ["f0", "other"]},
        r"ValueError: table 'item': the batch has no feature 'f1', only \['f0', 'other'\]; give",
    ),
    "negative length": ({"lengths": torch.tensor([4, -1])}, "non-negative"),
    "too long": ({"lengths": torch.tensor([2, 9])}, MISFIT),
    "too short": ({"lengths": torch.tensor([1, 1])}, MISFIT),
    "float lengths": ({"lengths": torch.tensor([2.0, 1.0])}, "lengths must be of integer type"),
    "-1": (
        {"values": torch.tensor([1, 2, -1])},
        "RuntimeError: table 'item' has 5 rows here",
    ),
}


@functools.cache
def _answers(pooled: bool) -> dict[str, str]:
    def ask() -> dict[str, str]:
        found = {}
        for name, (changes, _) in BATCHES.items():
            sharded = _model(pooled)
            sharded(_batch()).backward()
            if "length" in name or name.startswith("too"):  # TorchRec checks a first batch only
                sharded = _model(pooled)
            found[name] = _refusal(sharded, lambda: sharded(_batch(**changes)).backward())  # noqa: B023
        return found

    return run_on_ranks(1, ask)[0]


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("name", BATCHES)
def test_batch(name, pooled):
    with pytest.raises(RuntimeError, match=BATCHES[name][1]):
        raise RuntimeError(_answers(pooled)[name])


def test_a_batch_is_refused_by_the_rank_that_made_it():
    """Before it is distributed, whoever has the table."""

    def feed() -> str:
        sharded = _model()
        if dist.get_rank() == 0:
            return "waits for nobody"
        return _refusal(sharded, lambda: sharded(_batch(values=torch.tensor([1.0, 2.0, 3.0]))))

    assert "TypeError" in run_on_ranks(2, feed)[1]


def _other_width(state: dict[str, Any], key: str) -> None:
    state[key]["user.accum"] = torch.zeros(7, 4)


CHECKPOINTS = {
    "another optimizer": (
        lambda state, key: state.__setitem__(key, {"user.momentum1": torch.zeros(7, 8)}),
        r"table 'user': the checkpoint has the states \['momentum1'\], but OptimType.FTRL has",
    ),
    "no table": (lambda state, key: state.pop(key), "table 'user': the checkpoint has no states"),
    "another width": (
        _other_width,
        r"state 'accum' has shape \(7, 4\) in the checkpoint",
    ),
    "no clock": (
        lambda state, key: [
            states.pop(name)
            for states in state.values()
            for name in [*states]
            if name.endswith(".step")
        ],
        "the checkpoint has no step, which OptimType.ADAM needs; .*state_step",
    ),
    "two clocks": (
        lambda state, key: state[key].__setitem__("user.step", torch.tensor([9])),
        "different steps for tables that are updated together: .*'user': 9",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name):
    change, message = CHECKPOINTS[name]

    def load() -> str:
        sharded = _model(fused_params=ADAM if "clock" in name else FTRL)
        sharded(_batch()).backward()
        saved = sharded.fused_optimizer.state_dict()
        saved["state"] = {key: dict(states) for key, states in saved["state"].items()}
        change(saved["state"], next(key for key in saved["state"] if "user" in key))
        return _refusal(sharded, lambda: sharded.fused_optimizer.load_state_dict(saved))

    with pytest.raises(RuntimeError, match=f"(?s)ValueError: .*{message}"):
        raise RuntimeError(run_on_ranks(1, load)[0])


GROUPS = (
    "tables that do not fit, constraints that leave no plan",
    "plan that drops the optimizer",
    "dtype of a batch",
    "feature that is missing",
    "lengths of a batch",
    "checkpoint of another optimizer, table or width",
    "checkpoint without a clock, or with two",
)
