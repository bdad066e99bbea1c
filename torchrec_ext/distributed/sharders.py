"""TorchRec's sharders, restricted to what trains a table with its fused optimizer."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from torchrec_ext.distributed import hook, plan, table_optimizers
from torchrec_ext.optim_type import OptimType

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


class _OptimizerAware(BaseEmbeddingSharder[ModuleT], Generic[ModuleT]):
    """What both sharders add to TorchRec's."""

    # Sharding types that TorchRec trains on CPU although its sharder does not offer them there.
    more_cpu_sharding_types: tuple[str, ...] = ()

    def __init__(self, fused_params: dict[str, Any] | None = None, **keywords: Any) -> None:
        # A copy: TorchRec and FBGEMM add keys of their own.
        given = None if fused_params is None else dict(fused_params)
        table_optimizers.check_shared(given or {})
        super().__init__(given, **keywords)
        self._tables_have_ours = False
        hook.install()

    def shardable_parameters(self, module: ModuleT) -> dict[str, torch.nn.Parameter]:
        """The module's tables by name.

        A planner asks for a module's tables and then, without naming the module, for sharding types
        and kernels: whether one of these tables has an optimizer class of ours is noted here.
        """
        parameters = super().shardable_parameters(module)
        self._tables_have_ours = any(
            table_optimizers.applied_optimizer(parameter, table) is not None
            for table, parameter in parameters.items()
        )
        return parameters

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types that honour the optimizer, TorchRec's own list if it is not ours."""
        types = super().sharding_types(compute_device_type)
        if not self._ours():
            return types
        if compute_device_type == "cpu":
            types = [*types, *(t for t in self.more_cpu_sharding_types if t not in types)]
        return [sharding_type for sharding_type in types if sharding_type in plan.SHARDING_TYPES]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The compute kernels that honour the optimizer, TorchRec's own list if it is not ours."""
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        if not self._ours():
            return kernels
        return [kernel for kernel in plan.KERNELS if kernel in kernels] or list(plan.KERNELS[:1])

    def shard(
        self,
        module: ModuleT,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards the module; the hook is put in place if somebody took it off meanwhile.

        Raises:
            PlanError: The plan would train a table without its fused optimizer.
            HyperparameterError: A hyperparameter is unknown or out of range for a table.
        """
        hook.install()
        return super().shard(module, params, env, device, module_fqn)

    def _ours(self) -> bool:
        optimizer = (self.fused_params or {}).get("optimizer")
        return self._tables_have_ours or isinstance(optimizer, OptimType)


class EmbeddingBagCollectionSharder(_OptimizerAware, embeddingbag.EmbeddingBagCollectionSharder):
    """TorchRec's sharder of an ``EmbeddingBagCollection``, for fused optimizers of this package.

    With an ``OptimType`` in ``fused_params``, or an optimizer class of ``torchrec_ext.optim`` on a
    table, a planner is offered only what runs that optimizer: no data_parallel, no dense and no
    key-value kernels; on CPU also row_wise, table_row_wise and grid_shard. It counts the memory of
    the optimizer's states as they are allocated (see ``torchrec_ext.distributed.planner``).
    Otherwise it is TorchRec's.

    TorchRec divides the gradients of sharded tables by the number of ranks. Where each rank takes
    the mean over its share of the batch, that makes the gradient of the mean over the global batch,
    whatever the number of ranks. A loss that sums over examples comes out divided by the number of
    ranks: FTRL's ``l1_reg`` then weighs that many times more against it.

    ``EXACT_ROWWISE_ADAGRAD`` keeps one accumulator per row *and shard*: under column_wise and
    grid_shard it depends on how many columns a shard has, as FBGEMM's does.

    Args:
        fused_params: The optimizer, its hyperparameters and the module's settings for every table
            that has no optimizer of its own, e.g. ``{"optimizer": OptimType.FTRL,
            "learning_rate": 0.1}``. Copied.
        **keywords: TorchRec's other keywords.

    Raises:
        TypeError: ``optimizer`` in ``fused_params`` is neither an ``OptimType`` nor FBGEMM's
            ``EmbOptimType``, or is missing beside hyperparameters that only ours have.
    """

    more_cpu_sharding_types = (
        ShardingType.ROW_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
        ShardingType.GRID_SHARD.value,
    )


class EmbeddingCollectionSharder(_OptimizerAware, embedding.EmbeddingCollectionSharder):
    """TorchRec's sharder of an ``EmbeddingCollection``, for fused optimizers of this package.

    Offers table_wise, column_wise and row_wise with fused kernels when the optimizer is one of
    ours, with the memory of its states counted, and what TorchRec offers otherwise.

    Args:
        fused_params: As for ``EmbeddingBagCollectionSharder``. Copied.
        **keywords: TorchRec's other keywords.

    Raises:
        TypeError: As for ``EmbeddingBagCollectionSharder``.
        ValueError: ``drop_bad_indices`` with ``use_index_dedup``.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, **keywords: Any) -> None:
        if keywords.get("use_index_dedup") and (fused_params or {}).get("drop_bad_indices"):
            raise ValueError(
                "fused_params: drop_bad_indices=True with use_index_dedup=True; indices are "
                "deduplicated before they reach the tables, where an index of no row is an error. "
                "Leave one of them out"
            )
        super().__init__(fused_params, **keywords)
