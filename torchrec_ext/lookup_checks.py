"""Checks of a batch before it is looked up: of shapes, and on the CPU of offsets."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from torch import Tensor

from torchrec_ext.bad_indices import offsets_problem
from torchrec_ext.optimizer_states import OptimizerStates

INDEX_DTYPES = (torch.int32, torch.int64)


def check_lookup(
    module: OptimizerStates, indices: Any, offsets: Any, per_sample_weights: Any, variable: bool
) -> None:
    """Checks the tensors of a batch.

    Args:
        module: Looks them up.
        indices: Expected int32 or int64 ``[lookups]``.
        offsets: Expected int32 or int64 ``[features * batch_size + 1]``.
        per_sample_weights: Expected ``[lookups]`` of real numbers, or None.
        variable: Whether batch sizes differ (VBE).

    Raises:
        TypeError: One is no tensor or has another dtype.
        ValueError: One has another shape or is on another device, or weights come without pooling,
            or with mean pooling and float16 output on the CPU.
            All errors name the tables, the argument and what was expected.
    """
    tables = f"tables {module.table_labels}: "
    _check_integers(tables, "indices", indices, module)
    _check_integers(tables, "offsets", offsets, module)
    features = len(module.feature_table_map)
    if offsets.numel() == 0 or (not variable and (offsets.numel() - 1) % features != 0):
        raise ValueError(
            f"{tables}offsets has {offsets.numel()} elements, expected features * batch_size + 1 "
            f"with {features} features"
        )
    if per_sample_weights is not None:
        _check_weights(tables, per_sample_weights, indices, module)
    if module.use_cpu and not offsets.is_meta:
        _check_bags(tables, indices, offsets, module.bounds_check_mode_int)


def _check_integers(tables: str, name: str, tensor: Any, module: OptimizerStates) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{tables}{name} is a {type(tensor).__name__}, expected a tensor")
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(
            f"{tables}{name} has dtype {tensor.dtype}, expected torch.int32 or torch.int64; "
            "convert it with .long()"
        )
    _check_shape(tables, name, tensor, module)


def _check_shape(tables: str, name: str, tensor: Tensor, module: OptimizerStates) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{tables}{name} has shape {list(tensor.shape)}, expected one dimension")
    device = module._flat_weights.device
    if tensor.device.type != device.type:
        raise ValueError(
            f"{tables}{name} is on {tensor.device}, the tables are on {device}; move it with "
            f".to({str(device)!r})"
        )


def _check_weights(tables: str, weights: Any, indices: Tensor, module: OptimizerStates) -> None:
    if module.pooling_mode == PoolingMode.NONE:
        raise ValueError(f"{tables}per_sample_weights need sum or mean pooling")
    half = module.output_dtype == SparseType.FP16.as_int()
    if module.use_cpu and module.pooling_mode == PoolingMode.MEAN and half:
        raise ValueError(
            f"{tables}per_sample_weights with mean pooling need output_dtype=SparseType.FP32: "
            "for float16, FBGEMM's lookup on the CPU gives sums"
        )
    if not isinstance(weights, Tensor):
        raise TypeError(
            f"{tables}per_sample_weights is a {type(weights).__name__}, expected a tensor"
        )
    if weights.is_complex():
        raise TypeError(
            f"{tables}per_sample_weights has dtype {weights.dtype}, expected real numbers"
        )
    _check_shape(tables, "per_sample_weights", weights, module)
    if weights.numel() != indices.numel():
        raise ValueError(
            f"{tables}per_sample_weights has {weights.numel()} elements for {indices.numel()} "
            "indices, expected one for each"
        )


def _check_bags(tables: str, indices: Tensor, offsets: Tensor, bounds_check_mode: int) -> None:
    """FBGEMM's bounds check leaves the first offset as it is; without the check it reads any."""
    problem = None
    if bounds_check_mode == BoundsCheckMode.NONE.value:
        problem = offsets_problem(offsets, indices.numel())
    elif int(offsets[0]) != 0:
        problem = f"offsets must start at 0, but offsets[0]={int(offsets[0])}"
    if problem is not None:
        raise ValueError(tables + problem)
