"""What the tests of modules on a device do; imports FBGEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags
from torchrec_ext.twin import BareTwin, Description, Table, largest

from ..modules import HYPERPARAMETERS, POOLING, fill, random_batch, random_tables, snapshot
from ..reference import Batch

SHAPES = [(50, 64), (3, 64), (2000, 64), (31, 64)]
STEPS = 3
PRECISIONS = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
CPU = (EmbeddingLocation.HOST, ComputeDevice.CPU)


def _module(
    optimizer: OptimType,
    location: EmbeddingLocation,
    device: ComputeDevice,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    **keywords: Any,
) -> TableBatchedEmbeddingBags:
    return TableBatchedEmbeddingBags(
        [(rows, dim, location, device) for rows, dim in shapes],
        optimizer=optimizer,
        **HYPERPARAMETERS[optimizer],
        **keywords,
    )


def _pair(
    optimizer: OptimType, location: EmbeddingLocation = EmbeddingLocation.DEVICE, **keywords: Any
) -> tuple[TableBatchedEmbeddingBags, TableBatchedEmbeddingBags]:
    """The same module on the device and on the CPU, with the same weights."""
    pair = (
        _module(optimizer, location, ComputeDevice.CUDA, **keywords),
        _module(optimizer, *CPU, **keywords),
    )
    tables = random_tables(keywords.get("shapes", SHAPES))
    for module in pair:
        fill(module, tables)
    return pair


def _batch(pooling: str = "sum", weighted: bool = False) -> Batch:
    return random_batch([rows for rows, _ in SHAPES], 64, 9, pooling=pooling, weighted=weighted)


def _look_up(module: TableBatchedEmbeddingBags, batch: Batch, **keywords: Any) -> Tensor:
    device = module.current_device
    weights = None if batch.weights is None else batch.weights.to(device)
    return module(batch.indices.to(device), batch.offsets.to(device), weights, **keywords)


def _step(
    module: TableBatchedEmbeddingBags, batch: Batch, gradient: Tensor, **keywords: Any
) -> None:
    _look_up(module, batch, **keywords).backward(gradient.to(module.current_device))


def _assert_same(on_device: TableBatchedEmbeddingBags, on_cpu: TableBatchedEmbeddingBags) -> None:
    on_device.flush()
    for found, expected in zip(snapshot(on_device), snapshot(on_cpu), strict=True):
        assert torch.equal(found.cpu(), expected)
    assert int(on_device.iter) == int(on_cpu.iter)


def _gradient(batch: Batch) -> Tensor:
    pooled = (64, sum(dim for _, dim in SHAPES))
    return torch.randn(pooled if batch.pooling != "none" else (batch.indices.numel(), 64))


def check_against_cpu(optimizer: OptimType, pooling: str, weights_precision: str) -> None:
    """Trains on both; weights and states must have the same bits."""
    pair = _pair(
        optimizer,
        pooling_mode=POOLING[pooling],
        weights_precision=PRECISIONS[weights_precision],
    )
    for _ in range(STEPS):
        batch = _batch(pooling, weighted=pooling == "sum")
        gradient = _gradient(batch)
        for module in pair:
            _step(module, batch, gradient)
            module.set_learning_rate(module.get_learning_rate() * 0.5)
    _assert_same(*pair)


def check_any_width(optimizer: OptimType, pooling: str, weights_precision: str) -> None:
    """Dims that are no multiples of 4: the lookup is ours, the bits of the update the CPU's."""
    shapes = [(50, 3), (3, 64), (2000, 7), (31, 1)]
    if pooling == "none":
        shapes = [(50, 7), (3, 7), (2000, 7), (31, 7)]
    pair = _pair(
        optimizer,
        shapes=shapes,
        pooling_mode=POOLING[pooling],
        weights_precision=PRECISIONS[weights_precision],
    )
    for _ in range(STEPS):
        batch = _batch(pooling, weighted=pooling == "sum")
        outputs = [_look_up(module, batch) for module in pair]
        torch.testing.assert_close(outputs[0].cpu(), outputs[1], rtol=1e-5, atol=1e-5)
        gradient = torch.randn(outputs[1].shape)
        for output in outputs:
            output.backward(gradient.to(output.device))
    _assert_same(*pair)


def check_variable_batches(optimizer: OptimType) -> None:
    """As above, with features of different batch sizes."""
    pair = _pair(optimizer)
    sizes = [[3, 1], [0, 2], [5, 5], [1, 0]]
    for _ in range(STEPS):
        lengths = torch.randint(0, 9, (sum(map(sum, sizes)),))
        per_feature = lengths.split([sum(each) for each in sizes])
        indices = torch.cat(
            [
                torch.randint(0, rows, (int(each.sum()),))
                for (rows, _), each in zip(SHAPES, per_feature, strict=True)
            ]
        )
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        gradient = torch.randn(sum(sum(each) for each in sizes) * 64)
        for module in pair:
            _step(
                module,
                Batch(indices, offsets),
                gradient,
                batch_size_per_feature_per_rank=sizes,
            )
    _assert_same(*pair)


def check_captured_step(optimizer: OptimType) -> None:
    """Replays of forward and backward count and follow the learning rate."""
    captured, on_cpu = _pair(optimizer, weights_precision=SparseType.FP16)
    batch = _batch()
    indices, offsets = batch.indices.cuda(), batch.offsets.cuda()
    gradient = _gradient(batch).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured(indices, offsets).backward(gradient)
    torch.cuda.current_stream().wait_stream(side)
    _step(on_cpu, batch, gradient.cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured(indices, offsets).backward(gradient)
    for learning_rate in (0.1, 0.03, 0.2):
        for module in (captured, on_cpu):
            module.set_learning_rate(learning_rate)
        graph.replay()
        _step(on_cpu, batch, gradient.cpu())
    _assert_same(captured, on_cpu)


def check_managed(optimizer: OptimType, location: str) -> None:
    """Tables in managed memory, cached or not."""
    pair = _pair(optimizer, EmbeddingLocation[location], cache_load_factor=0.2)
    for _ in range(STEPS):
        batch = _batch(weighted=True)
        gradient = _gradient(batch)
        for module in pair:
            _step(module, batch, gradient)
    _assert_same(*pair)


def largest_difference(optimizer: OptimType, **settings: Any) -> float:
    """Trains twins on the device."""
    tables = (Table("user", 100, 64, ("a", "b")), Table("item", 30, 64))
    hyperparameters = dict(HYPERPARAMETERS[optimizer])
    description = Description(tables, optimizer, hyperparameters, device="cuda", **settings)
    return largest(BareTwin(description).run(steps=20)).value
