"""Our kernels hand their module what TorchRec's kernels hand FBGEMM's."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import PoolingType
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.types import ShardingType, ShardMetadata
from torchrec.modules.embedding_configs import DataType

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import kernels


class Recorded(Exception):
    """Raised instead of building a module; carries the keywords."""


def _record(*arguments: Any, **keywords: Any) -> Any:
    raise Recorded(arguments, keywords)


@pytest.fixture
def recording(monkeypatch):
    torchrec_ext.install()
    monkeypatch.setattr(batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", _record)
    monkeypatch.setattr(kernels, "TableBatchedEmbeddingBags", _record)


def _config(
    optimizer: object, kernel: EmbeddingComputeKernel, pooling: PoolingType, data_type: DataType
) -> GroupedEmbeddingConfig:
    def table(name: str, features: list[str], kernel: EmbeddingComputeKernel, rows: int):
        return ShardedEmbeddingTable(
            num_embeddings=50,
            embedding_dim=16,
            name=name,
            embedding_names=features,
            data_type=data_type,
            feature_names=features,
            pooling=pooling,
            local_rows=rows,
            local_cols=8,
            compute_kernel=kernel,
            local_metadata=ShardMetadata(
                shard_offsets=[4, 8], shard_sizes=[rows, 8], placement="rank:0/cpu"
            ),
            global_metadata=object(),
        )

    return GroupedEmbeddingConfig(
        data_type=data_type,
        pooling=pooling,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        embedding_tables=[
            table("t0", ["f0", "f1"], kernel, 20),
            table("t1", ["f2"], EmbeddingComputeKernel.FUSED, 30),
        ],
        fused_params={"optimizer": optimizer, "learning_rate": 0.5, "res_store_shards": 3},
    )


def _recorded(
    optimizer: object,
    pooled: bool,
    device: torch.device | None,
    sharding_type: ShardingType | None,
    **config: Any,
) -> tuple[dict[str, Any], bool]:
    """What the factory would build the module from, and whether it asks for prefetching."""
    pooling = config.pop("pooling", PoolingType.SUM) if pooled else PoolingType.NONE
    group = _config(optimizer, pooling=pooling, **config)
    before = dict(group.fused_params)
    owner = GroupedPooledEmbeddingsLookup if pooled else GroupedEmbeddingsLookup
    lookup = owner.__new__(owner)
    torch.nn.Module.__init__(lookup)
    lookup._need_prefetch = False
    arguments = (device, None, sharding_type, None) if pooled else (None, device, None)
    with pytest.raises(Recorded) as caught:
        owner._create_embedding_kernel(lookup, group, *arguments)
    positional, keywords = caught.value.args
    assert not positional
    if isinstance(optimizer, OptimType):
        assert group.fused_params == before, "the group's own dict is not edited"
    keywords["res_params"] = vars(keywords["res_params"])
    assert keywords.pop("optimizer") == optimizer
    return keywords, lookup._need_prefetch


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16], ids=str)
def test_our_kernel_passes_the_keywords_that_torchrecs_passes(recording, pooled, device, data_type):
    where = None if device is None else torch.device(device)
    for sharding_type in (None, ShardingType.ROW_WISE):
        for pooling in (PoolingType.SUM, PoolingType.MEAN) if pooled else (PoolingType.NONE,):
            arguments = {"kernel": EmbeddingComputeKernel.FUSED, "data_type": data_type}
            if pooled:
                arguments["pooling"] = pooling
            theirs = _recorded(EmbOptimType.EXACT_SGD, pooled, where, sharding_type, **arguments)
            ours = _recorded(OptimType.EXACT_SGD, pooled, where, sharding_type, **arguments)
            assert ours == theirs


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    "kernel",
    [
        EmbeddingComputeKernel.FUSED,
        EmbeddingComputeKernel.FUSED_UVM,
        EmbeddingComputeKernel.FUSED_UVM_CACHING,
    ],
    ids=lambda kernel: kernel.value,
)
def test_tables_on_cuda_are_placed_as_torchrec_places_them(recording, pooled, kernel):
    arguments = {"kernel": kernel, "data_type": DataType.FP32}
    device = torch.device("cuda")
    theirs = _recorded(EmbOptimType.EXACT_SGD, pooled, device, None, **arguments)
    assert _recorded(OptimType.EXACT_SGD, pooled, device, None, **arguments) == theirs


def test_a_device_without_kernels_of_ours_is_refused(recording):
    group = _config(OptimType.FTRL, EmbeddingComputeKernel.FUSED, PoolingType.SUM, DataType.FP32)
    with pytest.raises(NotImplementedError, match=r"\['t0', 't1'\].*'mtia'"):
        kernels.FusedEmbeddingBagKernel(group, None, torch.device("mtia"))
