"""CUDA tensors where the kernels are not there: the error says how to build them."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrec_ext import OptimType, cuda, ops
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from ..modules import kernel_values

HOW = "built without CUDA; with a CUDA build of torch.*USE_CUDA=1 pip install"


@pytest.fixture(autouse=True)
def built_without(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "load", lambda: "torchrec_ext was built without CUDA")


def _tensors() -> tuple[torch.Tensor, ...]:
    """Gradient, weights, layout, features, indices and offsets of one lookup."""
    on_cuda = {"device": "cuda"}
    return (
        torch.ones(1, 4, **on_cuda),
        torch.zeros(12, **on_cuda),
        torch.tensor([[3, 4, 0]]),
        torch.tensor([0]),
        torch.zeros(1, dtype=torch.int64, **on_cuda),
        torch.zeros(2, dtype=torch.int64, **on_cuda),
    )


def test_fused_update() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=f"fused_update got tensors.*{HOW}"):
        gradient, weights, layout, features, indices, offsets = _tensors()
        ops.fused_update(
            gradient,
            weights,
            [],
            layout,
            features,
            indices,
            offsets,
            None,
            pooling_mode=ops.POOLING_SUM,
            optimizer=OptimType.EXACT_SGD,
            hyperparameters=kernel_values(OptimType.EXACT_SGD, lr=1.0),
        )


def test_per_sample_weight_grad() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=f"weight_grad got tensors.*{HOW}"):
        ops.per_sample_weight_grad(*_tensors(), None, pooling_mode=ops.POOLING_SUM)


def test_lookup() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match=f"lookup got tensors.*{HOW}"):
        ops.lookup(*_tensors(), None, pooling_mode=ops.POOLING_SUM)


def test_dense_mode_is_on_the_cpu_only() -> None:
    with pytest.raises(ValueError, match=r"tables \['user'\]: sparse_mode='dense'.*use 'lazy'"):
        TableBatchedEmbeddingBags(
            [(3, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            optimizer=OptimType.ADAM,
            sparse_mode="dense",
            table_names=["user"],
        )


@pytest.mark.parametrize("dim", [4, 3])
def test_a_module(dim) -> None:
    with pytest.raises(ValueError, match=f"table 'user' is on.*{HOW}"):
        TableBatchedEmbeddingBags(
            [(3, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            optimizer=OptimType.FTRL,
            table_names=["user"],
        )
