"""Small modules and batches for the tests of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from .hyperparameters import CASES as CASES
from .hyperparameters import HYPERPARAMETERS as HYPERPARAMETERS
from .hyperparameters import kernel_values as kernel_values
from .hyperparameters import of_update as of_update
from .reference import Batch

POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "none": PoolingMode.NONE}


def make_module(
    optimizer: OptimType, shapes: Sequence[tuple[int, int]], pooling: str = "sum", **keywords: Any
) -> TableBatchedEmbeddingBags:
    """A module on the CPU with tables of ``(rows, dim)``, all weights zero."""
    return TableBatchedEmbeddingBags(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes],
        pooling_mode=POOLING[pooling],
        optimizer=optimizer,
        **keywords,
    )


def fill(module: TableBatchedEmbeddingBags, tables: Sequence[Tensor]) -> None:
    """Copies weights into the module's tables."""
    for weight, table in zip(module.split_embedding_weights(), tables, strict=True):
        weight.copy_(table)


def random_tables(shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """float32 weights that a half holds exactly, so that both precisions start alike."""
    return [torch.randn(shape).half().float() for shape in shapes]


def random_batch(
    rows: Sequence[int],
    examples: int,
    longest: int,
    *,
    pooling: str = "sum",
    weighted: bool = False,
    index_dtype: torch.dtype = torch.int64,
) -> Batch:
    """Bags of 0 to ``longest`` lookups, for features whose tables have these rows."""
    lengths = torch.randint(0, longest + 1, (len(rows), examples))
    lengths[torch.tensor(rows) == 0] = 0
    indices = torch.cat(
        [torch.randint(0, max(n, 1), (int(k.sum()),)) for n, k in zip(rows, lengths, strict=True)]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    weights = torch.randn(indices.numel()) if weighted else None
    return Batch(indices.to(index_dtype), offsets.to(index_dtype), weights, pooling)


def run_forward(module: TableBatchedEmbeddingBags, batch: Batch) -> Tensor:
    """The module's output for a batch."""
    return module(batch.indices.clone(), batch.offsets.clone(), batch.weights)


def single_step(
    module: TableBatchedEmbeddingBags, gradient: float, row: int = 0, times: int = 1
) -> float:
    """Looks a row up ``times`` times, one bag each; gives its first weight after the update."""
    output = module(torch.full((times,), row), torch.arange(times + 1))
    output.backward(torch.full_like(output, gradient))
    return float(module.split_embedding_weights()[0][row, 0])


def snapshot(module: TableBatchedEmbeddingBags) -> list[Tensor]:
    """Copies of all weights and states."""
    states = [state for table in module.split_optimizer_states() for state in table]
    return [tensor.clone() for tensor in [*module.split_embedding_weights(), *states]]


def assert_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Compares weights and states of two modules, or of one at two times."""
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest ``|difference| / max(1, |expected|)``."""
    if found.numel() == 0:
        return 0.0
    expected = expected.double()
    return float(((found.double() - expected).abs() / expected.abs().clamp(min=1.0)).max())


HALF = {"weights_precision": SparseType.FP16, "stochastic_rounding": False}
