"""The hook: the functions of TorchRec that decide how a table is trained.

Two factories build the kernel of a group of tables and choose it by compute kernel alone; ours look
at the optimizer first. Three methods describe the tables to shard, on every rank alike: the place
to read our optimizer classes and to refuse a plan before any rank has built anything. One moves a
table between ranks and would lose states. The modules that ``SEAMS`` names at its end describe
theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import ShardedEmbeddingBag, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingStrategy

from torchrec_ext.distributed import (
    batches,
    checkpoint_load,
    checkpoint_plan,
    estimates,
    eviction,
    fused_collections,
    fused_optimizer,
    index_dedup,
    mean_lookups,
    patching,
    plan,
    proposals,
    replica_sync,
    reshard,
    sharded_modules,
    table_optimizers,
)
from torchrec_ext.distributed.kernels import FusedEmbeddingBagKernel, FusedEmbeddingKernel
from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import HyperparameterError


def install() -> None:
    """Puts the hook in place; see ``torchrec_ext.install``.

    Raises:
        UnsupportedTorchRecError: The installed TorchRec is not known. Nothing was changed.
    """
    patching.wrap(SEAMS)
    index_dedup.register()


def uninstall() -> None:
    """Takes the hook off; see ``torchrec_ext.uninstall``.

    Raises:
        RuntimeError: A function was wrapped again after ``install()``. Nothing was changed.
    """
    patching.unwrap(SEAMS)


def in_place() -> bool:
    """Whether the hook is in place."""
    return all(patching.in_place(seam) for seam in SEAMS)


def _optimizer(config: GroupedEmbeddingConfig) -> OptimType | None:
    optimizer = (config.fused_params or {}).get("optimizer")
    return optimizer if isinstance(optimizer, OptimType) else None


def _pooled_factory(original: Function) -> Function:
    @functools.wraps(original)
    def create(
        self: Any,
        config: GroupedEmbeddingConfig,
        device: Any,
        pg: Any,
        sharding_type: Any,
        env: Any,
    ) -> BaseEmbedding:
        if _optimizer(config) is None:
            return original(self, config, device, pg, sharding_type, env)
        return _build(config, env, FusedEmbeddingBagKernel, pg, device, sharding_type, env)

    return create


def _sequence_factory(original: Function) -> Function:
    @functools.wraps(original)
    def create(
        self: Any, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        if _optimizer(config) is None:
            return original(self, config, pg, device, env)
        kernels = {table.compute_kernel for table in config.embedding_tables}
        if EmbeddingComputeKernel.FUSED_UVM_CACHING in kernels:
            self._need_prefetch = True
        return _build(config, env, FusedEmbeddingKernel, pg, device)

    return create


def _build(
    config: GroupedEmbeddingConfig,
    env: ShardingEnv | None,
    kernel: Callable[..., BaseEmbedding],
    *arguments: Any,
) -> BaseEmbedding:
    """Builds our kernel for a group of tables, or says which table cannot have it and why."""
    optimizer = _optimizer(config)
    assert optimizer is not None
    tables = [table.name for table in config.embedding_tables]
    for table in config.embedding_tables:
        problem = plan.kernel_problem(table.name, optimizer, table.compute_kernel.value)
        if problem is None and table.global_metadata is None:
            problem = plan.sharding_type_problem(table.name, optimizer, "data_parallel")
        if problem is not None:
            raise plan.PlanError(problem)
    if isinstance(env, ShardingEnv2D):
        _check_2d(tables, optimizer, env)
    try:
        return kernel(config, *arguments)
    except HyperparameterError as error:
        raise HyperparameterError(f"{table_optimizers.named(tables)}: {error}") from error


def _check_2d(tables: list[str], optimizer: OptimType, env: ShardingEnv2D) -> None:
    """TorchRec's kernel for fully sharded weights is built around FBGEMM's module."""
    if env.sharding_strategy == ShardingStrategy.FULLY_SHARDED:
        raise plan.PlanError(
            f"{table_optimizers.named(tables)}: OptimType.{optimizer.name} does not train under "
            "ShardingStrategy.FULLY_SHARDED; give DMPCollection "
            "sharding_strategy=ShardingStrategy.DEFAULT"
        )


def _bag_infos(original: Function) -> Function:
    @functools.wraps(original)
    def describe(
        cls: Any,
        module: Any,
        table_name_to_parameter_sharding: Any,
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> Any:
        arguments = (table_name_to_parameter_sharding, prefix, fused_params, suffix)
        return _checked_infos(original, cls, module, fused_params, arguments)

    return describe


def _sequence_infos(original: Function) -> Function:
    @functools.wraps(original)
    def describe(
        cls: Any,
        module: Any,
        table_name_to_parameter_sharding: Any,
        fused_params: dict[str, Any] | None,
    ) -> Any:
        arguments = (table_name_to_parameter_sharding, fused_params)
        infos_by_type = _checked_infos(original, cls, module, fused_params, arguments)
        plan.check_sequence_widths(info for group in infos_by_type.values() for info in group)
        return infos_by_type

    return describe


def _single_bag(original: Function) -> Function:
    @functools.wraps(original)
    def create(cls: Any, sharding_infos: Any, *arguments: Any, **keywords: Any) -> Any:
        # TorchRec gives a lone nn.EmbeddingBag the sharder's fused_params and reads no class.
        for info in sharding_infos:
            table_optimizers.settle([info], info.fused_params)
        plan.check_sharding(sharding_infos)
        return original(cls, sharding_infos, *arguments, **keywords)

    return create


def _checked_infos(
    original: Function,
    cls: type,
    module: Any,
    fused_params: dict[str, Any] | None,
    arguments: tuple[Any, ...],
) -> Any:
    with table_optimizers.shown_to_torchrec(module):
        infos_by_type = original(cls, module, *arguments)
    infos = [info for group in infos_by_type.values() for info in group]
    table_optimizers.settle(infos, fused_params)
    plan.check_sharding(infos)
    mean_lookups.rows_of_features(infos)  # refuses what it cannot do
    return infos_by_type


def _reshard(original: Function) -> Function:
    @functools.wraps(original)
    def update_shards(self: Any, changed_sharding_params: Any, env: Any, device: Any) -> None:
        snapshot = reshard.take_snapshot(self)
        with fused_optimizer.states_hidden():
            original(self, changed_sharding_params, env, device)
        reshard.restore(snapshot, self, env.process_group)

    return update_shards


SEAMS = (
    Seam(
        GroupedPooledEmbeddingsLookup,
        "_create_embedding_kernel",
        ("self", "config", "device", "pg", "sharding_type", "env"),
        _pooled_factory,
    ),
    Seam(
        GroupedEmbeddingsLookup,
        "_create_embedding_kernel",
        ("self", "config", "pg", "device", "env"),
        _sequence_factory,
    ),
    Seam(
        ShardedEmbeddingBagCollection,
        "create_grouped_sharding_infos",
        (
            "cls",
            "module",
            "table_name_to_parameter_sharding",
            "prefix",
            "fused_params",
            "suffix",
        ),
        _bag_infos,
    ),
    Seam(
        ShardedEmbeddingCollection,
        "create_grouped_sharding_infos",
        ("cls", "module", "table_name_to_parameter_sharding", "fused_params"),
        _sequence_infos,
    ),
    Seam(
        ShardedEmbeddingBag,
        "create_embedding_bag_sharding",
        (
            "cls",
            "sharding_infos",
            "env",
            "device",
            "permute_embeddings",
            "qcomm_codecs_registry",
        ),
        _single_bag,
    ),
    Seam(
        ShardedEmbeddingBagCollection,
        "update_shards",
        ("self", "changed_sharding_params", "env", "device"),
        _reshard,
    ),
    *batches.SEAMS,
    *checkpoint_load.SEAMS,
    *checkpoint_plan.SEAMS,
    *estimates.SEAMS,
    *eviction.SEAMS,
    *fused_collections.SEAMS,
    *fused_optimizer.SEAMS,
    *proposals.SEAMS,
    *replica_sync.SEAMS,
    *sharded_modules.SEAMS,
)
