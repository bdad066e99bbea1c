"""Typed wrappers of the extension's ops.

Imports neither fbgemm_gpu nor torchrec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_ext import (
    cuda,
    fake_kernels,  # noqa: F401  registers them
)
from torchrec_ext.op_arguments import DeviceTables, VariableBatch, device_layout, step_scalars
from torchrec_ext.optim_type import OPTIM_TYPES, OptimType

__all__ = [
    "POOLING_MEAN",
    "POOLING_NONE",
    "POOLING_SUM",
    "DeviceTables",
    "VariableBatch",
    "catch_up",
    "device_layout",
    "fused_update",
    "lookup",
    "per_sample_weight_grad",
    "sort_lookups",
    "step_scalars",
]

cuda.load()
_LIBRARY = torch.ops.torchrec_ext

#: FBGEMM's PoolingMode values.
POOLING_SUM, POOLING_MEAN, POOLING_NONE = 0, 1, 2


def fused_update(
    grad_output: Tensor,
    weights: Tensor,
    states: Sequence[Tensor],
    table_layout: Tensor,
    feature_table_map: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    *,
    segments: Sequence[Tensor] = (),
    pooling_mode: int,
    optimizer: OptimType,
    hyperparameters: Sequence[float],
    max_gradient: float = math.inf,
    stochastic_rounding: bool = False,
    seed: int = 0,
    step: int = 0,
    variable_batch: VariableBatch | None = None,
    tables: DeviceTables | None = None,
    scalars: Tensor | None = None,
) -> None:
    """Applies one optimizer step to every row that a batch looks up, in place.

    On a device, with ``tables`` and ``scalars`` given, nothing waits for the host, and a CUDA graph
    can capture the call: what changes from step to step is read from ``scalars`` there.

    A row's gradients are summed in float32 before the update, in the order of
    ``csrc/gradient_order.h``. Weights and states get the same bits whatever the number of threads,
    the instruction set or the device.

    Args:
        grad_output: Gradient of the lookup's output: ``[batch_size, sum of the features' dims]``,
            or ``[lookups, D]`` without pooling. float32 and contiguous on the CPU; float32,
            float16 or bfloat16 on CUDA.
        weights: All tables' weights, flat, float32, float16 or bfloat16. All other tensors are on
            the same device, but for the next two of integers.
        states: The optimizer's states in the order of its spec, each flat, float32.
        table_layout: int64 ``[tables, 3 + len(states)]``, on the CPU: rows, dim, the table's first
            element in ``weights`` and in each state. On CUDA dims are at most 2048, and where all
            are multiples of 4, tables begin at multiples of 4.
        feature_table_map: int64 ``[features]``, on the CPU: the table that each feature reads.
        indices: int32 or int64 ``[lookups]``.
        offsets: Of the same dtype, ``[features * batch_size + 1]``: where each bag starts in
            ``indices``, feature by feature.
        per_sample_weights: float32 ``[lookups]`` or None.
        segments: What :func:`sort_lookups` returned for this batch; empty: sorts here.
        pooling_mode: ``POOLING_SUM``, ``POOLING_MEAN`` or ``POOLING_NONE``.
        optimizer: Which update.
        hyperparameters: Its ``kernel_hyperparameters``.
        max_gradient: Each element of ``grad_output`` is clamped to ``[-max_gradient,
            max_gradient]`` first.
        stochastic_rounding: How float16 and bfloat16 weights are rounded; to nearest where false.
        seed: Key of the stochastic rounding.
        step: The completed updates; also a key of the stochastic rounding.
        variable_batch: The batch sizes where they differ; None: all features have the same.
        tables: For CUDA; None: made for this call.
        scalars: :func:`step_scalars` for CUDA, which then go before ``hyperparameters`` and
            ``step``; None: made of these for this call.

    Raises:
        RuntimeError: An argument has a wrong shape, dtype or device, an index is outside of its
            table, or the offsets are not ascending. Nothing was changed. On CUDA bad indices and
            offsets are device-side assertions, which end the process's use of the device.
    """
    if _is_on_device(weights):
        tables = _device_tables("fused_update", weights, table_layout, feature_table_map, tables)
        if scalars is None:
            scalars = step_scalars(hyperparameters, step, weights.device)
    _LIBRARY.fused_update(
        grad_output,
        weights,
        states,
        table_layout,
        feature_table_map,
        indices,
        offsets,
        per_sample_weights,
        segments,
        pooling_mode,
        OPTIM_TYPES.index(optimizer),
        hyperparameters,
        max_gradient,
        stochastic_rounding,
        seed,
        step,
        step_scalars=scalars,
        managed_states=None if tables is None else tables.managed_states,
        **_batch_and_tables(variable_batch, tables),
    )


def per_sample_weight_grad(
    grad_output: Tensor,
    weights: Tensor,
    table_layout: Tensor,
    feature_table_map: Tensor,
    indices: Tensor,
    offsets: Tensor,
    feature_requires_grad: Tensor | None,
    *,
    pooling_mode: int,
    max_gradient: float = math.inf,
    variable_batch: VariableBatch | None = None,
    tables: DeviceTables | None = None,
) -> Tensor:
    """The gradient of ``per_sample_weights``.

    Args:
        grad_output: As in :func:`fused_update`; so are the arguments not named here.
        weights: The gradient is that of a lookup in these weights: as they were in the forward,
            unless an update came between.
        table_layout: As in :func:`fused_update`.
        feature_table_map: As in :func:`fused_update`.
        indices: As in :func:`fused_update`.
        offsets: As in :func:`fused_update`.
        feature_requires_grad: int32 ``[features]``; the gradient is 0 for features with 0. None:
            all features require it.
        pooling_mode: ``POOLING_SUM`` or ``POOLING_MEAN``.
        max_gradient: As in :func:`fused_update`.
        variable_batch: As in :func:`fused_update`.
        tables: As in :func:`fused_update`.

    Returns:
        float32 ``[lookups]``: the inner product of the bag's output gradient with the row looked
        up, divided by the bag's length where pooling is mean.

    Raises:
        RuntimeError: As :func:`fused_update`.
    """
    if _is_on_device(weights):
        tables = _device_tables(
            "per_sample_weight_grad", weights, table_layout, feature_table_map, tables
        )
    return _LIBRARY.per_sample_weight_grad(
        grad_output,
        weights,
        table_layout,
        feature_table_map,
        indices,
        offsets,
        feature_requires_grad,
        pooling_mode,
        max_gradient,
        **_batch_and_tables(variable_batch, tables),
    )


def lookup(
    output: Tensor,
    weights: Tensor,
    table_layout: Tensor,
    feature_table_map: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    *,
    pooling_mode: int,
    variable_batch: VariableBatch | None = None,
    tables: DeviceTables | None = None,
) -> None:
    """Looks a batch's rows up and pools them, on CUDA: FBGEMM's lookup there has widths of its own.

    A bag is summed in float32 from +0, in the order of its lookups, each row times its per-sample
    weight; the mean is the sum divided by the bag's length.

    Args:
        output: Is written: as ``grad_output`` in :func:`fused_update`, contiguous.
        weights: As in :func:`fused_update`; so are the arguments not named here.
        table_layout: As in :func:`fused_update`, with any number of states.
        feature_table_map: As in :func:`fused_update`.
        indices: As in :func:`fused_update`.
        offsets: As in :func:`fused_update`.
        per_sample_weights: As in :func:`fused_update`.
        pooling_mode: As in :func:`fused_update`.
        variable_batch: As in :func:`fused_update`.
        tables: As in :func:`fused_update`; all tables are in ``weights``.

    Raises:
        RuntimeError: As :func:`fused_update`, and for tensors on the CPU.
    """
    if not _is_on_device(weights):
        raise RuntimeError(
            f"lookup got weights on {weights.device}; it runs on CUDA, and FBGEMM's lookup on the "
            "CPU takes any dim"
        )
    tables = _device_tables("lookup", weights, table_layout, feature_table_map, tables)
    _LIBRARY.lookup(
        output,
        weights,
        table_layout,
        feature_table_map,
        indices,
        offsets,
        per_sample_weights,
        pooling_mode,
        device_layout=tables.layout,
        **_batch_arguments(variable_batch),
    )


def _is_on_device(weights: Tensor) -> bool:
    return weights.is_cuda


def _device_tables(
    op: str,
    weights: Tensor,
    table_layout: Tensor,
    feature_table_map: Tensor,
    tables: DeviceTables | None,
) -> DeviceTables:
    """The tables for an op on a device: those given, or made for this call."""
    cuda.check_available(op)
    return tables or device_layout(table_layout, feature_table_map, weights.device)


def _batch_arguments(batch: VariableBatch | None) -> dict[str, Tensor | None]:
    """Batch sizes that differ, as arguments of the ops."""
    return {
        "feature_bags": None if batch is None else batch.feature_bags,
        "gradient_offsets": None if batch is None else batch.gradient_offsets,
    }


def _batch_and_tables(
    batch: VariableBatch | None, tables: DeviceTables | None
) -> dict[str, Tensor | None]:
    """Both as arguments of the ops."""
    return {
        **_batch_arguments(batch),
        "device_layout": None if tables is None else tables.layout,
        "managed_weights": None if tables is None else tables.managed_weights,
        "cache_weights": None if tables is None else tables.cache_weights,
        "cache_locations": None if tables is None else tables.cache_locations,
    }


def sort_lookups(
    table_layout: Tensor,
    feature_table_map: Tensor,
    indices: Tensor,
    offsets: Tensor,
    *,
    variable_batch: VariableBatch | None = None,
) -> list[Tensor]:
    """Sorts a batch's lookups by row.

    Args:
        table_layout: As in :func:`fused_update`, with any number of states.
        feature_table_map: As in :func:`fused_update`.
        indices: As in :func:`fused_update`.
        offsets: As in :func:`fused_update`.
        variable_batch: As in :func:`fused_update`.

    Returns:
        The rows that are looked up, ascending, int64 ``[rows]``, numbered across tables; int32
        ``[rows + 1]``, where each row's lookups begin in the third: int32 ``[lookups]``, positions
        in ``indices``.

    Raises:
        RuntimeError: An index is outside of its table, or the offsets are not ascending.
    """
    feature_bags = None if variable_batch is None else variable_batch.feature_bags
    return _LIBRARY.sort_lookups(table_layout, feature_table_map, indices, offsets, feature_bags)


def catch_up(
    weights: Tensor,
    states: Sequence[Tensor],
    row_steps: Tensor,
    table_layout: Tensor,
    rows: Tensor | None,
    *,
    history: Tensor,
    history_start: int,
    window: int,
    now: int,
    optimizer: OptimType,
    hyperparameters: Sequence[float],
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> None:
    """Applies to rows the updates that they slept through, in place.

    Args:
        weights: As in :func:`fused_update`; so are the arguments not named here.
        states: As in :func:`fused_update`.
        row_steps: int32 ``[rows of all tables]``, the update that each row is current to; becomes
            ``now`` for the rows caught up.
        table_layout: As in :func:`fused_update`.
        rows: int64, ascending, numbered across tables; None: all rows.
        history: float64 ``[3, capacity]``, see :mod:`torchrec_ext.sleeping_rows`.
        history_start: The update that the history's first entry is for.
        window: The updates after which an entry of the history is no longer added to.
        now: The completed updates.
        optimizer: As in :func:`fused_update`.
        hyperparameters: As in :func:`fused_update`.
        stochastic_rounding: As in :func:`fused_update`.
        seed: As in :func:`fused_update`.

    Raises:
        RuntimeError: An argument is wrong, or a row is older than the history. Nothing was changed.
    """
    _LIBRARY.catch_up(
        weights,
        states,
        row_steps,
        table_layout,
        rows,
        history,
        history_start,
        window,
        now,
        OPTIM_TYPES.index(optimizer),
        hyperparameters,
        stochastic_rounding,
        seed,
    )
