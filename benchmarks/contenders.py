"""The modules that are measured against each other, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from benchmarks.shapes import Shape
from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

HYPERPARAMETERS: dict[OptimType, dict[str, Any]] = {
    OptimType.EXACT_SGD: {"learning_rate": 0.01},
    OptimType.EXACT_ADAGRAD: {"learning_rate": 0.01},
    OptimType.EXACT_ROWWISE_ADAGRAD: {"learning_rate": 0.01},
    OptimType.FTRL: {"learning_rate": 0.01, "ftrl_beta": 1.0, "l1_reg": 1e-3, "l2_reg": 1e-3},
    OptimType.ADAM: {"learning_rate": 0.01, "weight_decay": 0.01},
}


class Contender(Protocol):
    """A lookup with an optimizer."""

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """The output of a batch."""

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """Gradient and update."""


class Fused:
    """A table-batched module whose backward updates."""

    def __init__(self, module: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        """Gives the module random weights."""
        module.init_embedding_weights_uniform(-0.1, 0.1)
        self.module = module

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`Contender`."""
        return self.module(indices, offsets)

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """See :class:`Contender`."""
        output.backward(gradient)


class TorchSparse:
    """torch.nn.EmbeddingBag with sparse gradients and an optimizer of torch.optim."""

    def __init__(self, shape: Shape, optimizer: type[torch.optim.Optimizer]) -> None:
        """Make one module per table."""
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(shape.rows, shape.dim, mode="sum", sparse=True)
            for _ in range(shape.tables)
        )
        self.optimizer = optimizer(self.bags.parameters(), lr=0.01)  # type: ignore[call-arg]
        self.bag_length = shape.pooling

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`Contender`."""
        parts = indices.view(len(self.bags), -1, self.bag_length)
        return torch.cat([bag(part) for bag, part in zip(self.bags, parts, strict=True)], dim=1)

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """See :class:`Contender`."""
        output.backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _keywords(shape: Shape, shared: bool) -> dict[str, Any]:
    """The tables; where shared, neighbouring features read one table of two."""
    tables = max(shape.tables // 2, 1) if shared else shape.tables
    spec = (shape.rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    keywords: dict[str, Any] = {"embedding_specs": [spec] * tables}
    if shared:
        keywords["feature_table_map"] = [f * tables // shape.tables for f in range(shape.tables)]
    return keywords


def ours(
    optimizer: OptimType, shared: bool = False, **hyperparameters: Any
) -> Callable[[Shape], Contender]:
    """A contender of torchrec_ext."""

    def make(shape: Shape) -> Contender:
        keywords = {**_keywords(shape, shared), **HYPERPARAMETERS[optimizer], **hyperparameters}
        return Fused(TableBatchedEmbeddingBags(optimizer=optimizer, **keywords))

    return make


def fbgemm(optimizer: EmbOptimType, shared: bool = False) -> Callable[[Shape], Contender]:
    """A contender of FBGEMM."""

    def make(shape: Shape) -> Contender:
        keywords = {**_keywords(shape, shared), "learning_rate": 0.01}
        return Fused(SplitTableBatchedEmbeddingBagsCodegen(optimizer=optimizer, **keywords))

    return make
