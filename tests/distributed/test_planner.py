"""Plans fit with the optimizers' states, or are refused; and what a plan takes, in bytes."""

import doctest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import planner as stock
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import DataType

import torchrec_ext
from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    plan_memory,
    planner,
)
from torchrec_ext.distributed.planner import (
    EmbeddingShardingPlanner,
    ShardMemory,
    plan_table,
    rank_totals,
)

from ..hyperparameters import HYPERPARAMETERS
from . import models, planning
from .ranks import run_on_ranks

FTRL = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}
NAMES = ("t0", "t1", "t2", "t3")


def _planner(kind: Any, capacity: int, names: Any, types: Any, device: str = "cpu") -> Any:
    memory = "ddr_cap" if device == "cpu" else "hbm_cap"
    return kind(
        topology=planning.topology(device, **{memory: capacity}),
        batch_size=planning.BATCH_SIZE,
        constraints=planning.constraints(types, ["fused"], names),
        # The whole topology is for the tables, so that the tests can count in bytes.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        debug=False,
    )


def _placed(plan: Any) -> dict[str, tuple[str, list[int]]]:
    (tables,) = plan.plan.values()
    return {name: (table.sharding_type, table.ranks) for name, table in tables.items()}


def _model(names: Any, by_class: bool, rows: Any = planning.ROWS) -> tuple[torch.nn.Module, Any]:
    tables = planning.collection(names, rows=rows)
    if by_class:
        for name in names:
            planning.apply(tables, optim.FTRL, name)
    sharder = EmbeddingBagCollectionSharder(None if by_class else FTRL)
    return torch.nn.Sequential(tables), sharder


def _stock_plan(model: Any, sharder: Any, *arguments: Any) -> Any:
    torchrec_ext.uninstall()
    return _planner(stock.EmbeddingShardingPlanner, *arguments).plan(model, [sharder])


# A float16 table of 1000 x 64 takes 640,000 bytes with FTRL's states, and its batch 17,408: for
# TorchRec the weights' 128,000 or, with a class that it does not know, 256,000.
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("by_class", [False, True])
def test_tables_that_do_not_fit_with_their_states_are_refused(by_class, device):
    model, sharder = _model(NAMES, by_class)
    # Together 2,560,000 bytes and four batches, on four ranks.
    few = (650_000, NAMES, ["table_wise", "row_wise"], device)
    with pytest.raises(PlannerError, match="insufficient storage"):
        _planner(EmbeddingShardingPlanner, *few).plan(model, [sharder])
    enough = (660_000, *few[1:])
    plan = _planner(EmbeddingShardingPlanner, *enough).plan(model, [sharder])
    assert sorted(ranks for _, ranks in _placed(plan).values()) == [[0], [1], [2], [3]]
    assert len(_placed(_stock_plan(model, sharder, *few))) == len(NAMES)


@pytest.mark.parametrize("by_class", [False, True])
def test_a_table_that_fits_on_no_rank_is_split_into_rows(by_class):
    model, sharder = _model(NAMES, by_class, rows={"t0": 1000, "t1": 100, "t2": 100, "t3": 100})
    limits = (400_000, NAMES, ["table_wise", "row_wise"])
    stocks = _placed(_stock_plan(model, sharder, *limits))
    ours = _placed(_planner(EmbeddingShardingPlanner, *limits).plan(model, [sharder]))
    assert {kind for kind, _ in stocks.values()} == {"table_wise"}
    assert ours["t0"] == ("row_wise", [0, 1, 2, 3])


def test_tables_are_spread_where_the_stock_planner_puts_too_many_on_a_rank():
    """Eight tables on four ranks that hold two each; by their weights one rank holds three."""
    names = [f"t{number}" for number in range(8)]
    model, sharder = _model(names, by_class=False)
    # A batch makes t0 as slow as the others together: by time alone it stays alone.
    limits = (1_400_000, names, ["table_wise"])

    def plan(kind: Any, installed: bool) -> list[int]:
        torchrec_ext.uninstall()
        if installed:
            torchrec_ext.install()
        made = _planner(kind, *limits)
        made._constraints["t0"].pooling_factors = [50.0]
        ranks = [ranks[0] for _, ranks in _placed(made.plan(model, [sharder])).values()]
        return sorted(ranks.count(rank) for rank in range(4))

    assert plan(stock.EmbeddingShardingPlanner, installed=False) == [1, 2, 2, 3]
    assert plan(EmbeddingShardingPlanner, installed=False) == [2, 2, 2, 2]
    assert plan(stock.EmbeddingShardingPlanner, installed=True) == [2, 2, 2, 2]


def _shards_of(tables: Any, sharder: Any, device: str = "cpu", **limits: Any) -> Any:
    made = EmbeddingShardingPlanner(
        topology=planning.topology(device),
        batch_size=planning.BATCH_SIZE,
        constraints=planning.constraints(**limits),
        debug=False,
    )
    made.plan(torch.nn.Sequential(tables), [sharder])
    return made.memory


def test_the_memory_of_a_plan_in_bytes():
    tables = planning.collection(["t0", "t1"])
    planning.apply(tables, optim.Adam, "t0", bias_correction="per_row")
    planning.apply(tables, optim.FTRL, "t1")
    limits = {"names": ["t0", "t1"], "sharding_types": ["row_wise"]}
    memory = _shards_of(tables, EmbeddingBagCollectionSharder(), **limits)
    # 32 examples of 4 ranks: each rank looks up its quarter, and makes an output for all of them.
    input_output = 32 * 8 + 32 * 4 * 64 * 2
    states = {
        "t0": {"exp_avg": 64_000, "exp_avg_sq": 64_000, "row_counter": 1_000},
        "t1": {"linear": 64_000, "accum": 64_000},
    }
    sizes = {name: 32_000 + sum(states[name].values()) + input_output for name in states}
    expected = [
        ShardMemory(
            table=name,
            sharding_type="row_wise",
            compute_kernel="fused",
            rank=rank,
            rows=250,
            dim=64,
            weights=32_000,
            states=states[name],
            cache=0,
            input_output=input_output,
            hbm=0,
            ddr=sizes[name],
        )
        for name in states
        for rank in range(4)
    ]
    assert sorted(memory, key=lambda shard: (shard.table, shard.rank)) == expected
    totals = rank_totals(memory)
    assert list(totals) == [0, 1, 2, 3]
    assert totals[3] == {
        "weights": 64_000,
        "exp_avg": 64_000,
        "exp_avg_sq": 64_000,
        "row_counter": 1_000,
        "linear": 64_000,
        "accum": 64_000,
        "cache": 0,
        "input/output": 2 * input_output,
        "hbm": 0,
        "ddr": sum(sizes.values()),
        "ssd": 0,
    }


@pytest.mark.parametrize("sharding_type", planning.SHARDING_TYPES)
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
@pytest.mark.parametrize("cls", [optim.PartialRowWiseAdam, torch.optim.Adam])
def test_the_parts_of_a_shard_add_up_to_what_the_planner_counted(cls, kernel, sharding_type):
    tables = planning.collection()
    planning.apply(tables, cls)
    sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.FTRL})
    limits = {"sharding_types": [sharding_type], "kernels": [kernel]}
    memory = _shards_of(tables, sharder, "cuda", **limits)
    assert sum(shard.rows * shard.dim for shard in memory) == 64_000
    for shard in memory:
        assert shard.weights == shard.rows * shard.dim * 2
        parts = shard.weights + sum(shard.states.values()) + shard.cache + shard.input_output
        assert parts == shard.total
        assert (shard.cache > 0) == (kernel == "fused_uvm_caching")
        assert shard.input_output > 0
        if cls is torch.optim.Adam and kernel != "fused_uvm_caching":
            assert shard.states == {"optimizer": 2 * shard.weights}
        if cls is optim.PartialRowWiseAdam and kernel == "fused_uvm":
            assert shard.ddr == shard.weights + shard.states["exp_avg"]


def test_a_cache_is_a_fifth_of_the_weights_and_its_bookkeeping():
    tables = planning.collection()
    sharder = EmbeddingBagCollectionSharder(FTRL)
    limits = {"sharding_types": ["table_wise"], "kernels": ["fused_uvm_caching"]}
    (shard,) = _shards_of(tables, sharder, "cuda", **limits)
    assert shard.cache == 128_000 // 5 + 1000 * 4 + 1000 // 5 * 16


def _shard(**changed: Any) -> ShardMemory:
    values = {"table": "t0", "sharding_type": "row_wise", "compute_kernel": "fused", "rank": 0}
    sizes = {"weights": 4_000, "states": {}, "cache": 0, "input_output": 512}
    values |= {"rows": 1_000, "dim": 4, **sizes, "hbm": 0, "ddr": 4_512, **changed}
    return ShardMemory(**values)


def test_a_plans_memory_is_laid_out_by_shard_and_rank():
    memory = [
        _shard(rank=1, states={"linear": 16_000, "accum": 16_000}, ddr=36_512),
        _shard(table="item", states={"sum": 4_000}, ddr=8_512),
        _shard(table="user", rank=1),
    ]
    columns = "table rank rows dim sharding kernel weights linear accum sum input/output ddr"
    assert [" ".join(line.split()) for line in plan_table(memory).splitlines()] == [
        columns,
        "t0 1 1,000 4 row_wise fused 4,000 16,000 16,000 512 36,512",
        "item 0 1,000 4 row_wise fused 4,000 4,000 512 8,512",
        "user 1 1,000 4 row_wise fused 4,000 512 4,512",
        "all tables 0 4,000 4,000 512 8,512",
        "all tables 1 8,000 16,000 16,000 1,024 41,024",
    ]
    header, _, item, *_ = plan_table(memory).splitlines()
    assert item.index("4,000", item.index("4,000") + 5) > header.index("accum") + len("accum")


def _allocated(
    fused_params: dict[str, Any], sharding_type: str, pooled: bool, dtype: DataType
) -> tuple[Any, dict]:
    """What a plan counts, and the bytes of every tensor that sharding by it makes."""
    tables = models.SUM_TABLES[:2] if pooled else models.SEQUENCE_TABLES[:2]
    model = models.Model(tables, pooled)
    collection = model.ebc if pooled else model.ec
    for config in collection.embedding_bag_configs() if pooled else collection.embedding_configs():
        config.data_type = dtype
    if dtype == DataType.FP16:
        collection.half()
    sharder_type = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
    sharder = sharder_type(fused_params)
    size = dist.get_world_size()
    made = EmbeddingShardingPlanner(
        topology=stock.Topology(world_size=size, local_world_size=size, compute_device="cpu"),
        constraints={
            table.name: stock.ParameterConstraints(
                sharding_types=[sharding_type], min_partition=models.COLUMNS_PER_SHARD
            )
            for table in tables
        },
        debug=False,
    )
    plan = made.collective_plan(model, [sharder], dist.group.WORLD)
    sharded = models.shard(model, [sharder], plan)
    found: dict[str, list] = {}
    for kernel in models.kernels_of(sharded):
        module = kernel.emb_module
        weights, states = module.split_embedding_weights(), module.get_optimizer_state()
        for table, weight, of_table in zip(
            kernel.config.embedding_tables, weights, states, strict=True
        ):
            sizes = {name: state.nbytes for name, state in of_table.items()}
            if module._sleeping is not None:
                sizes["row_steps"] = 4 * len(weight)
                assert module._sleeping.row_steps.element_size() == 4
            found.setdefault(table.name, []).append((weight.nbytes, sizes))
    rank = dist.get_rank()
    return (made.memory if rank == 0 else None), found


@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("sharding_type", planning.SHARDING_TYPES)
@pytest.mark.parametrize(
    ("optimizer", "hyperparameters"),
    [
        *((optimizer, HYPERPARAMETERS[optimizer]) for optimizer in OptimType),
        (OptimType.EXACT_SGD, {"momentum": 0.5, "sparse_mode": "dense"}),
        (OptimType.ADAM, {"bias_correction": "per_row"}),
    ],
)
def test_what_is_allocated_is_what_the_plan_counts(
    optimizer, hyperparameters, sharding_type, dtype
):
    sequences = ("table_wise", "column_wise", "row_wise")
    pooled = optimizer != OptimType.FTRL or sharding_type not in sequences
    fused_params = {"optimizer": optimizer, **hyperparameters}
    answers = run_on_ranks(2, _allocated, fused_params, sharding_type, pooled, dtype)
    memory = answers[0][0]
    for rank, (_, found) in enumerate(answers):
        counted: dict[str, list] = {}
        for shard in memory:
            if shard.rank == rank:
                counted.setdefault(shard.table, []).append((shard.weights, dict(shard.states)))
        assert {t: sorted(s, key=str) for t, s in counted.items()} == {
            t: sorted(s, key=str) for t, s in found.items()
        }


def test_memory_is_known_after_a_plan_where_it_was_made():
    def plan() -> tuple[int, str]:
        made = EmbeddingShardingPlanner(debug=False)
        with pytest.raises(RuntimeError, match="no plan; call plan"):
            _ = made.memory
        tables = planning.collection()
        made.collective_plan(torch.nn.Sequential(tables), [EmbeddingBagCollectionSharder(FTRL)])
        try:
            return len(made.memory), ""
        except RuntimeError as error:
            return 0, str(error)

    (shards, _), (_, message) = run_on_ranks(2, plan)
    assert shards > 0
    assert "collective_plan" in message


def test_a_failed_plan_leaves_no_memory_of_the_one_before():
    model, sharder = _model(["t0"], by_class=False)
    made = _planner(EmbeddingShardingPlanner, 10**9, ["t0"], ["table_wise"])
    made.plan(model, [sharder])
    assert len(made.memory) == 1
    bigger, sharder = _model(NAMES, by_class=False)
    made._topology.devices[0].storage.ddr = 0
    made._constraints.update(planning.constraints(["row_wise"], ["fused"], NAMES))
    with pytest.raises(PlannerError):
        made.plan(bigger, [sharder])
    with pytest.raises(RuntimeError):
        _ = made.memory


def test_the_callers_callbacks_still_choose_the_plan():
    seen = []
    model, sharder = _model(["t0"], by_class=False)

    def callback(options: list) -> list:
        seen.append(options)
        options[0].shards[0].rank = 3
        return options

    made = EmbeddingShardingPlanner(
        topology=planning.topology(),
        constraints=planning.constraints(["table_wise"]),
        callbacks=[callback],
        debug=False,
    )
    plan = made.plan(model, [sharder])
    assert len(seen) == 1
    assert _placed(plan)["t0"][1] == [3]
    assert [shard.rank for shard in made.memory] == [3]


def test_a_model_without_tables_takes_nothing():
    made = EmbeddingShardingPlanner(topology=planning.topology(), debug=False)
    assert made.plan(torch.nn.Linear(2, 2), [EmbeddingBagCollectionSharder(FTRL)]).plan == {}
    assert made.memory == ()


@pytest.mark.parametrize("module", [planner, plan_memory], ids=lambda module: module.__name__)
def test_the_examples_run_as_they_are_printed(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
