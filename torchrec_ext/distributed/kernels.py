"""TorchRec's fused embedding kernels over our module instead of FBGEMM's.

Subclasses, so that every ``isinstance`` check of TorchRec still holds. Their constructors skip that
of the direct parent, whose only work is to build FBGEMM's module, and do what is left of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torchrec.distributed.batched_embedding_kernel import (
    ENABLE_RAW_EMBEDDING_STREAMING_STR,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    _populate_res_params,
)
from torchrec.distributed.composable.table_batched_embedding_slice import (
    TableBatchedEmbeddingSlice,
)
from torchrec.distributed.embedding_types import (
    GroupedEmbeddingConfig,
    compute_kernel_to_embedding_location,
)
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from torchrec_ext.distributed.fused_optimizer import FusedOptimizer
from torchrec_ext.tbe import TableBatchedEmbeddingBags


class _ParameterPerTable:
    """One parameter for all shards of a table, with an optimizer of its own, as TorchRec makes."""

    config: GroupedEmbeddingConfig
    table_name_to_count: dict[str, int]
    _emb_module: TableBatchedEmbeddingBags
    _pg: dist.ProcessGroup | None

    @property
    def _param_per_table(self) -> dict[str, TableBatchedEmbeddingSlice]:
        module, parameters = self._emb_module, {}
        for place, table in enumerate(self.config.embedding_tables):
            if table.name in parameters:
                continue
            rows, dim, _, _ = module.embedding_specs[place]
            buffer, start = module.place_of_weights(place)
            end = start + self.table_name_to_count[table.name] * rows * dim
            parameter = TableBatchedEmbeddingSlice(buffer, start, end, -1, dim)
            parameter._in_backward_optimizers = [
                FusedOptimizer(self.config, module, self._pg, (table.name, parameter))
            ]
            parameters[table.name] = parameter
        return parameters

    @_param_per_table.setter
    def _param_per_table(self, parameters: Any) -> None:
        """TorchRec's constructors set it."""


class FusedEmbeddingBagKernel(_ParameterPerTable, BatchedFusedEmbeddingBag):
    """The pooled kernel of an ``EmbeddingBagCollection``'s group of tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        super(BatchedFusedEmbeddingBag, self).__init__(config, pg, device, sharding_type)
        self._emb_module = _build_module(self, device, self._pooling)
        self._optim = FusedOptimizer(config, self._emb_module, pg)
        self.init_parameters()


class FusedEmbeddingKernel(_ParameterPerTable, BatchedFusedEmbedding):
    """The sequence kernel of an ``EmbeddingCollection``'s group of tables."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        super(BatchedFusedEmbedding, self).__init__(config, pg, device)
        self._emb_module = _build_module(self, device, PoolingMode.NONE)
        self._optim = FusedOptimizer(config, self._emb_module, pg)
        self.init_parameters()


def _build_module(
    kernel: FusedEmbeddingBagKernel | FusedEmbeddingKernel,
    device: torch.device | None,
    pooling_mode: PoolingMode,
) -> TableBatchedEmbeddingBags:
    """Builds the module of a kernel whose base class has read the group's tables."""
    config = kernel.config
    weights_precision = data_type_to_sparse_type(config.data_type)
    locations, compute_devices = _placement(config, device)
    return TableBatchedEmbeddingBags(
        embedding_specs=list(
            zip(kernel._local_rows, kernel._local_cols, locations, compute_devices, strict=True)
        ),
        feature_table_map=kernel._feature_table_map,
        pooling_mode=pooling_mode,
        weights_precision=weights_precision,
        device=device,
        table_names=[table.name for table in config.embedding_tables],
        embedding_shard_info=list(
            zip(
                kernel._num_embeddings,
                kernel._embedding_dims,
                kernel._row_offset,
                kernel._col_offset,
                strict=True,
            )
        ),
        **_module_keywords(config, weights_precision),
    )


def _placement(
    config: GroupedEmbeddingConfig, device: torch.device | None
) -> tuple[list[EmbeddingLocation], list[ComputeDevice]]:
    tables = config.embedding_tables
    if device is None or device.type in ("cpu", "meta"):
        return [EmbeddingLocation.HOST] * len(tables), [ComputeDevice.CPU] * len(tables)
    if device.type != "cuda":
        raise NotImplementedError(
            f"tables {[table.name for table in tables]}: torchrec_ext has kernels for the CPU and "
            f"CUDA, not for {device.type!r}"
        )
    locations = [compute_kernel_to_embedding_location(table.compute_kernel) for table in tables]
    return locations, [ComputeDevice.CUDA] * len(tables)


def _module_keywords(
    config: GroupedEmbeddingConfig, weights_precision: SparseType
) -> dict[str, Any]:
    """The group's ``fused_params`` as module keywords, on a copy: TorchRec edits them in place."""
    keywords = dict(config.fused_params or {})
    streaming, streaming_params = _populate_res_params(
        dataclasses.replace(config, fused_params=keywords)
    )
    keywords[ENABLE_RAW_EMBEDDING_STREAMING_STR] = streaming
    keywords["res_params"] = streaming_params
    cached_as = SparseType.FP16 if weights_precision == SparseType.NFP8 else weights_precision
    keywords.setdefault("cache_precision", cached_as)
    return keywords
