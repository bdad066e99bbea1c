"""Plans that would train a table without its optimizer are refused, on every rank, by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.remote_device import _remote_device
from torchrec import PoolingType
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan, ShardingStrategy

import torchrec_ext
from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    PlanError,
    hook,
    plan,
)
from torchrec_ext.optimizers import HyperparameterError

from . import models
from .ranks import run_on_ranks

FTRL = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}
REFUSED_KERNELS = [
    kernel.value for kernel in EmbeddingComputeKernel if kernel.value not in plan.KERNELS
]
SHARDERS = {
    (True, "ours"): EmbeddingBagCollectionSharder,
    (False, "ours"): EmbeddingCollectionSharder,
    (True, "stock"): embeddingbag.EmbeddingBagCollectionSharder,
    (False, "stock"): embedding.EmbeddingCollectionSharder,
}


def _refusal(
    pooled: bool, whose: str, change: Any, fused_params: dict[str, Any] = FTRL, ranks: int = 2
) -> set[str]:
    """Shards a model under a changed plan; every rank must raise PlanError, with one message."""

    def build() -> str:
        torchrec_ext.install()
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        sharder = SHARDERS[pooled, whose](fused_params)
        sharding_plan = models.plan_for(model, [sharder], "table_wise", tables)
        change(next(iter(sharding_plan.plan.values())))
        with pytest.raises(PlanError) as caught:
            models.shard(model, [sharder], sharding_plan)
        return str(caught.value)

    return set(run_on_ranks(ranks, build))


@pytest.mark.parametrize("kernel", REFUSED_KERNELS)
@pytest.mark.parametrize(("pooled", "whose"), SHARDERS)
def test_a_kernel_that_drops_the_optimizer_is_refused(pooled, whose, kernel):
    def change(sharding: Any) -> None:
        sharding["t1"].compute_kernel = kernel

    (message,) = _refusal(pooled, whose, change)
    assert "table 't1'" in message
    assert f"'{kernel}'" in message
    assert "ParameterConstraints(compute_kernels=['fused'])" in message
    assert "'t0'" not in message


@pytest.mark.parametrize("kernel", ["dense", "fused"])
@pytest.mark.parametrize(("pooled", "whose"), SHARDERS)
def test_data_parallel_is_refused(pooled, whose, kernel):
    def change(sharding: Any) -> None:
        for name in ("t0", "t2"):
            sharding[name].sharding_type = "data_parallel"
            sharding[name].compute_kernel = kernel
            sharding[name].sharding_spec = None

    (message,) = _refusal(pooled, whose, change)
    assert "table 't0'" in message and "table 't2'" in message and "'t1'" not in message
    assert "ParameterConstraints(sharding_types=['table_wise', " in message
    assert "compute_kernels=['fused']" in message


def test_a_plan_made_without_constraints_by_hand_is_refused():
    """``construct_module_sharding_plan`` chooses dense when it sees no optimizer on the table."""

    def build() -> None:
        torchrec_ext.install()
        model = models.Model(models.BAG_TABLES[:2])
        sharder = EmbeddingBagCollectionSharder(FTRL)
        module_plan = construct_module_sharding_plan(
            model.ebc,
            {"t0": table_wise(rank=0), "t1": data_parallel()},
            sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        models.shard(model, [sharder], ShardingPlan({"ebc": module_plan}))

    with pytest.raises(PlanError, match=r"(?s)table 't0'.*'dense'.*table 't1'.*'data_parallel'"):
        run_on_ranks(1, build)


@pytest.mark.parametrize("whose", ["ours", "stock"])
def test_the_optimizer_of_a_class_is_not_dropped_either(whose):
    def build() -> None:
        model = models.Model()
        _apply_optimizer_in_backward(
            optim.FTRL, model.ebc.embedding_bags["t1"].parameters(), {"lr": 0.1}
        )
        _apply_optimizer_in_backward(
            torch.optim.SGD, model.ebc.embedding_bags["t2"].parameters(), {"lr": 0.1}
        )
        sharder = SHARDERS[True, whose]()
        sharding_plan = models.plan_for(model, [sharder], "table_wise")
        sharding_plan.plan["ebc"]["t0"].compute_kernel = "dense"
        sharding_plan.plan["ebc"]["t1"].compute_kernel = "dense"
        models.shard(model, [sharder], sharding_plan)

    with pytest.raises(PlanError, match=r"^table 't1'[^\n]*$"):
        run_on_ranks(1, build)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lone_embedding_bag_is_refused_too(ranks):
    def build() -> None:
        torchrec_ext.install()
        bag = torch.nn.EmbeddingBag(8, 8, mode="sum", include_last_offset=True)
        module = torch.nn.Sequential(bag)
        sharder = embeddingbag.EmbeddingBagSharder(FTRL)
        module_plan = construct_module_sharding_plan(
            bag,
            {"weight": data_parallel()},
            sharder,
            local_size=ranks,
            world_size=ranks,
            device_type="cpu",
        )
        models.shard(module, [sharder], ShardingPlan({"0": module_plan}))

    with pytest.raises(PlanError, match="dummy_embedding_table_name.*'data_parallel'"):
        run_on_ranks(ranks, build)


@pytest.mark.parametrize("kernel", list(EmbeddingComputeKernel), ids=lambda kernel: kernel.value)
@pytest.mark.parametrize("pooled", [True, False])
def test_the_factories_are_the_last_line_of_defence(pooled, kernel):
    """A config that reached a factory on some path of its own."""
    torchrec_ext.install()
    table = SimpleNamespace(name="t0", compute_kernel=kernel, global_metadata=None)
    config = SimpleNamespace(
        fused_params=dict(FTRL), embedding_tables=[table], compute_kernel=kernel
    )
    lookup = SimpleNamespace(_need_prefetch=False)
    owner = GroupedPooledEmbeddingsLookup if pooled else GroupedEmbeddingsLookup
    arguments = (config, None, None, None, None) if pooled else (config, None, None, None)
    word = "data_parallel" if kernel.value in plan.KERNELS else kernel.value
    with pytest.raises(PlanError, match=f"table 't0'.*'{word}'"):
        owner._create_embedding_kernel(lookup, *arguments)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda s: s.name)
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_2d_parallelism_that_loses_states_is_refused(pooled, strategy, optimizer):
    table = SimpleNamespace(
        name="t0", compute_kernel=EmbeddingComputeKernel.FUSED, global_metadata=object()
    )
    config = SimpleNamespace(fused_params={"optimizer": optimizer}, embedding_tables=[table])
    env = ShardingEnv2D.__new__(ShardingEnv2D)
    env.sharding_strategy = strategy
    built = []

    def kernel(*arguments: Any) -> str:
        built.append(arguments)
        return "kernel"

    averaged = optimizer in (OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD)
    if averaged and strategy != ShardingStrategy.FULLY_SHARDED:
        assert hook._build(config, env, kernel) == "kernel"
    else:
        with pytest.raises(PlanError, match=f"table 't0'.*{optimizer.name}.*DMPCollection"):
            hook._build(config, env, kernel)
        assert not built


@pytest.mark.parametrize("optimizer", [OptimType.FTRL, OptimType.ADAM], ids=lambda o: o.name)
@pytest.mark.parametrize("sharding_type", ["table_row_wise", "grid_shard"])
def test_a_plan_that_counts_ranks_per_host_differently_is_refused(sharding_type, optimizer):
    def build(local_world_size: int) -> str | None:
        tables = models.SUM_TABLES[:2]
        model = models.Model(tables)
        sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})
        sharding_plan = models.plan_for(
            model, [sharder], sharding_type, tables, local_world_size=local_world_size
        )
        try:
            models.shard(model, [sharder], sharding_plan)
        except PlanError as error:
            return str(error)
        return None

    messages = run_on_ranks(4, build, 4, local_world_size=2)
    assert len(set(messages)) == 1
    assert "table 't0'" in messages[0] and "LOCAL_WORLD_SIZE" in messages[0]
    assert run_on_ranks(4, build, 2, local_world_size=2) == [None] * 4


@pytest.mark.parametrize("optimizer", [OptimType.FTRL, OptimType.ADAM], ids=lambda o: o.name)
def test_mean_pooling_under_grid_shard_is_refused(optimizer):
    def build() -> None:
        model = models.Model(models.BAG_TABLES)
        sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})
        models.shard(model, [sharder], models.plan_for(model, [sharder], "grid_shard"))

    assert models.BAG_TABLES[1].pooling == PoolingType.MEAN
    with pytest.raises(PlanError, match=r"^table 't1': mean pooling"):
        run_on_ranks(2, build)


def test_a_width_that_cuda_looks_up_in_device_memory_only_is_refused_by_table():
    def build() -> None:
        tables = (models.BAG_TABLES[0], models.Table("odd", 8, 6, ("f1",)))
        model = models.Model(tables)
        sharder = EmbeddingBagCollectionSharder(FTRL)
        sharding_plan = models.plan_for(model, [sharder], "table_wise", tables)
        for sharding in next(iter(sharding_plan.plan.values())).values():
            sharding.compute_kernel = "fused_uvm_caching"
            for part in sharding.sharding_spec.shards:
                part.placement = _remote_device("rank:0/cuda:0")
        models.shard(model, [sharder], sharding_plan)

    with pytest.raises(PlanError, match="^table 'odd': a shard of 6 columns with") as caught:
        run_on_ranks(1, build)
    message = str(caught.value)
    assert "'t0'" not in message
    assert "kernel 'fused_uvm_caching'" in message and "compute_kernels=['fused']" in message


@pytest.mark.parametrize(("pooled", "whose"), SHARDERS)
def test_an_unknown_hyperparameter_names_the_tables(pooled, whose):
    def build(wrong: dict[str, Any]) -> None:
        torchrec_ext.install()
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        _apply_optimizer_in_backward(
            optim.SGD, [next(p for n, p in model.named_parameters() if ".t1." in n)], {"lr": 0.1}
        )
        sharder = SHARDERS[pooled, whose]({**FTRL, **wrong})
        models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise", tables))

    for wrong in ({"l1reg": 0.5}, {"eps": 0.5}, {"l1_reg": -0.5}):
        (name,) = wrong
        with pytest.raises(HyperparameterError, match=f"'t0', 't2'.*{name}") as caught:
            run_on_ranks(2, build, wrong)
        if name != "l1reg":  # a name nobody knows is wrong for every table
            assert "'t1'" not in str(caught.value)


@pytest.mark.parametrize("pooled", [True, False])
def test_what_torchrec_and_fbgemm_add_to_fused_params_passes_through(pooled):
    from fbgemm_gpu.split_embedding_configs import SparseType
    from torchrec.distributed.types import BoundsCheckMode
    from torchrec.modules.embedding_configs import DataType

    extra = {
        "cache_precision": DataType.FP32,
        "output_dtype": DataType.FP32,
        "bounds_check_mode": BoundsCheckMode.WARNING,
        "prefetch_pipeline": False,
        "enable_raw_embedding_streaming": False,
        "res_store_shards": 2,
        "res_enabled_tables": "t0",
        "cache_load_factor": 0.5,
        "cache_reserved_memory": 1.0,
        "use_one_tbe_per_table": True,
        "_batch_key": "batch",
        "stochastic_rounding": False,
        "gradient_clipping": True,
        "max_gradient": 3.0,
        "rounding_seed": 11,
    }

    def build() -> list[Any]:
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        fused_params = {**FTRL, **extra}
        sharder = SHARDERS[pooled, "ours"](fused_params)
        sharding_plan = models.plan_for(model, [sharder], "table_wise", tables)
        sharded = models.shard(model, [sharder], sharding_plan)
        assert fused_params == {**FTRL, **extra}
        assert len(models.kernels_of(sharded)) == len(tables)
        assert all("res_params" not in k.config.fused_params for k in models.kernels_of(sharded))
        module = models.modules_by_table(sharded)["t0"]
        assert module.optimizer_args.max_gradient == 3.0
        assert module.bounds_check_mode_int == BoundsCheckMode.WARNING.value
        assert module.output_dtype == SparseType.FP32.as_int()
        assert module.rounding_seed == 11
        sharded(models.batches(1, tables)[0].of_rank(0, 1)).backward()
        return [dist.get_rank()]

    run_on_ranks(1, build)
