"""What DistributedModelParallel.fused_optimizer shows: learning rate, states, their names."""

import copy
import math

import pytest
import torch

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.optimizers import HyperparameterError, spec_of

from . import models
from .ranks import run_on_ranks

# No float32, and none of them a sum of few powers of two.
LEARNING_RATES = (0.1, 1 / 3, 0.05, 1e-7, math.pi)
SHARDING_TYPES = ("table_wise", "column_wise", "row_wise")


def _sharded(
    optimizer: OptimType,
    sharding_type: str = "table_wise",
    pooled: bool = True,
    learning_rate: float = 0.1,
    **hyperparameters: float,
) -> models.DistributedModelParallel:
    tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
    model = models.Model(tables, pooled)
    sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder = sharder_type(
        {"optimizer": optimizer, "learning_rate": learning_rate, **hyperparameters}
    )
    sharded = models.shard(
        model, [sharder], models.plan_for(model, [sharder], sharding_type, tables)
    )
    models.write_weights(sharded, models.initial_weights(tables))
    return sharded


def _train(sharded: models.DistributedModelParallel, steps: list[models.Lookups]) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in steps:
        sharded(step.of_rank(rank, ranks)).backward()


@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_the_learning_rate_is_the_very_float_that_was_given(optimizer):
    def rates() -> list[tuple[float, ...]]:
        found = []
        for rate in LEARNING_RATES:
            sharded = _sharded(optimizer, learning_rate=rate)
            groups = sharded.fused_optimizer.param_groups
            modules = models.modules_by_table(sharded).values()
            found.append(
                {group["lr"] for group in groups} | {m.get_learning_rate() for m in modules}
            )
        return found

    assert run_on_ranks(1, rates)[0] == [{rate} for rate in LEARNING_RATES]


@pytest.mark.parametrize("push", ["step", "zero_grad", "nothing"])
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_a_changed_learning_rate_reaches_the_next_update(optimizer, push):
    def train(change: bool) -> tuple[dict, set[float]]:
        sharded = _sharded(optimizer, learning_rate=0.1 if change else 1 / 3)
        if change:
            for group in sharded.fused_optimizer.param_groups:
                group["lr"] = 1 / 3
            if push != "nothing":
                getattr(sharded.fused_optimizer, push)()
        _train(sharded, models.batches(3))
        rates = {m.get_learning_rate() for m in models.modules_by_table(sharded).values()}
        return models.read_weights(sharded), rates

    changed, rates = run_on_ranks(1, train, True)[0]
    given, _ = run_on_ranks(1, train, False)[0]
    assert rates == {1 / 3}
    changed, given = models.assemble([changed]), models.assemble([given])
    assert all(torch.equal(changed[name], given[name]) for name in given)


def test_a_scheduler_drives_the_fused_optimizer():
    def rates() -> list[float]:
        sharded = _sharded(OptimType.FTRL, learning_rate=0.5)
        optimizer = sharded.fused_optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)
        (step,) = models.batches(1)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            sharded(step.of_rank(0, 1)).backward()
            found += {m.get_learning_rate() for m in models.modules_by_table(sharded).values()}
            optimizer.step()
            scheduler.step()
        return found

    assert run_on_ranks(1, rates) == [[0.5, 0.5 * 0.3, 0.5 * 0.3 * 0.3]]


def test_an_illegal_learning_rate_is_refused_when_it_is_pushed():
    def push() -> float:
        sharded = _sharded(OptimType.FTRL, learning_rate=0.5)
        for group in sharded.fused_optimizer.param_groups:
            group["lr"] = -1.0
        with pytest.raises(HyperparameterError, match="-1.0"):
            sharded.fused_optimizer.zero_grad()
        return {m.get_learning_rate() for m in models.modules_by_table(sharded).values()}

    assert run_on_ranks(1, push) == [{0.5}]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_state_dict_has_every_state_of_every_table_under_torchrecs_keys(optimizer, pooled):
    def keys() -> dict[str, list[str]]:
        sharded = _sharded(optimizer, "row_wise", pooled)
        state = sharded.fused_optimizer.state_dict()["state"]
        return {name: list(states) for name, states in state.items()}

    prefix = "ebc.embedding_bags" if pooled else "ec.embeddings"
    spec = spec_of(optimizer)
    names = [state.name for state in spec.states_for(spec.resolve({}))]
    names[:1] = ["momentum1"] if names else []
    if spec.saves_step(spec.resolve({})):
        names.append("step")
    names.append(f"{optimizer.name}_hyperparameters")
    expected = {
        f"{prefix}.{table}.weight": [f"{table}.{name}" for name in names]
        for table in ("t0", "t1", "t2")
    }
    assert run_on_ranks(2, keys) == [expected, expected]


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_training_goes_on_bit_for_bit_after_a_state_dict_round_trip(optimizer, sharding_type):
    steps = models.batches(6)

    def straight() -> tuple[dict, dict]:
        sharded = _sharded(optimizer, sharding_type)
        _train(sharded, steps)
        return models.read_weights(sharded), models.read_states(sharded)

    def resumed() -> tuple[dict, dict]:
        first = _sharded(optimizer, sharding_type)
        _train(first, steps[:3])
        weights = models.read_weights(first)
        saved = copy.deepcopy(first.fused_optimizer.state_dict())
        second = _sharded(optimizer, sharding_type)
        _train(second, steps[3:5])  # something else, to be overwritten
        for name, sharded_tensor in second.state_dict().items():
            for part, (_, value) in zip(
                sharded_tensor.local_shards(), weights[name.split(".")[-2]], strict=True
            ):
                part.tensor.copy_(value)
        second.fused_optimizer.load_state_dict(saved)
        _train(second, steps[3:])
        return models.read_weights(second), models.read_states(second)

    for one, other in zip(run_on_ranks(2, straight), run_on_ranks(2, resumed), strict=True):
        for left, right in zip(one, other, strict=True):
            assert left.keys() == right.keys()
            for name, parts in left.items():
                for (offsets, value), (other_offsets, other_value) in zip(
                    parts, right[name], strict=True
                ):
                    assert offsets == other_offsets
                    assert torch.equal(value, other_value), name


@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_states_start_from_the_specs_initial_values(optimizer):
    spec = spec_of(optimizer)
    names = {h.name for h in spec.hyperparameters}
    given = {"initial_accumulator_value": 0.25} if "initial_accumulator_value" in names else {}

    def initial() -> dict[str, set[float]]:
        states = models.read_states(_sharded(optimizer, "row_wise", **given))
        return {
            key: set(torch.cat([t.flatten() for _, t in v]).tolist()) for key, v in states.items()
        }

    found = run_on_ranks(1, initial)[0]
    values = spec.resolve(given)
    for number, state in enumerate(spec.states_for(values)):
        key = f"t0.{state.name if number else 'momentum1'}"
        assert found[key] == {spec.initial_value(state, values)}


def test_states_on_two_ranks_equal_those_on_one():
    def train() -> dict:
        sharded = _sharded(OptimType.FTRL, "row_wise", l1_reg=0.1)
        _train(sharded, models.batches(10))
        return models.read_states(sharded)

    one, two = models.assemble(run_on_ranks(1, train)), models.assemble(run_on_ranks(2, train))
    assert (
        one.keys() == two.keys() == {f"t{t}.{s}" for t in range(3) for s in ("momentum1", "accum")}
    )
    for key, state in one.items():
        torch.testing.assert_close(two[key], state, rtol=1e-5, atol=1e-5)
