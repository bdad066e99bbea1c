"""FBGEMM's backward on a CUDA device; importing this fails without the package fbgemm-gpu."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.shapes import Shape

if not hasattr(torch.ops.fbgemm, "lxu_cache_lookup"):
    raise ImportError("fbgemm_gpu is its CPU build")


def backward(
    shape: Shape, optimizer: str, batches: list[Tensor], gradient: Tensor
) -> Callable[[int], None]:
    """A function that runs the backward of a batch whose forward was run before."""
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.rows, shape.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * shape.tables,
        optimizer=getattr(EmbOptimType, optimizer),
        learning_rate=0.01,
    )
    offsets = shape.offsets().cuda()
    outputs = [module(batch, offsets) for batch in batches]

    def run(batch: int) -> None:
        outputs[batch].backward(gradient, retain_graph=True)

    return run
