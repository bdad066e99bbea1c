"""Typed wrappers of the extension's ops, with their fake kernels.

Imports neither fbgemm_gpu nor torchrec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_ext.optim_type import OPTIM_TYPES, OptimType

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
) -> None:
    """Applies one optimizer step to every row that a batch looks up, in place.

    A row's gradients are summed in float32 before the update: chunks of 32 lookups, each started
    from its first element, then the chunk sums in order. Weights and states get the same bits
    whatever the number of threads or the instruction set.

    Args:
        grad_output: Gradient of the lookup's output, float32, contiguous: ``[batch_size, sum of the
            features' dims]``, or ``[lookups, D]`` without pooling.
        weights: All tables' weights, flat, float32 or float16.
        states: The optimizer's states in the order of its spec, each flat, float32.
        table_layout: int64 ``[tables, 3 + len(states)]``: rows, dim, the table's first element in
            ``weights`` and in each state.
        feature_table_map: int64 ``[features]``, the table that each feature reads.
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
        stochastic_rounding: How float16 weights are rounded; to nearest where false.
        seed: Key of the stochastic rounding.
        step: Key of the stochastic rounding; must differ from update to update.

    Raises:
        RuntimeError: An argument has a wrong shape, dtype or device, an index is outside of its
            table, or the offsets are not ascending. Nothing was changed.
    """
    torch.ops.torchrec_ext.fused_update(
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

    Returns:
        float32 ``[lookups]``: the inner product of the bag's output gradient with the row looked
        up, divided by the bag's length where pooling is mean.

    Raises:
        RuntimeError: As :func:`fused_update`.
    """
    return torch.ops.torchrec_ext.per_sample_weight_grad(
        grad_output,
        weights,
        table_layout,
        feature_table_map,
        indices,
        offsets,
        feature_requires_grad,
        pooling_mode,
        max_gradient,
    )


def sort_lookups(
    table_layout: Tensor, feature_table_map: Tensor, indices: Tensor, offsets: Tensor
) -> list[Tensor]:
    """Sorts a batch's lookups by row.

    Args:
        table_layout: As in :func:`fused_update`, with any number of states.
        feature_table_map: As in :func:`fused_update`.
        indices: As in :func:`fused_update`.
        offsets: As in :func:`fused_update`.

    Returns:
        The rows that are looked up, ascending, int64 ``[rows]``, numbered across tables; int32
        ``[rows + 1]``, where each row's lookups begin in the third: int32 ``[lookups]``, positions
        in ``indices``.

    Raises:
        RuntimeError: An index is outside of its table, or the offsets are not ascending.
    """
    return torch.ops.torchrec_ext.sort_lookups(table_layout, feature_table_map, indices, offsets)


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
    torch.ops.torchrec_ext.catch_up(
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


@torch.library.register_fake("torchrec_ext::fused_update")
def _fused_update_fake(grad_output: Tensor, *_: object) -> None:
    return None


@torch.library.register_fake("torchrec_ext::per_sample_weight_grad")
def _per_sample_weight_grad_fake(
    grad_output: Tensor,
    weights: Tensor,
    table_layout: Tensor,
    feature_table_map: Tensor,
    indices: Tensor,
    *_: object,
) -> Tensor:
    return grad_output.new_empty(indices.numel(), dtype=torch.float32)


@torch.library.register_fake("torchrec_ext::sort_lookups")
def _sort_lookups_fake(
    table_layout: Tensor, feature_table_map: Tensor, indices: Tensor, offsets: Tensor
) -> list[Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return [
        indices.new_empty(rows, dtype=torch.int64),
        indices.new_empty(rows + 1, dtype=torch.int32),
        indices.new_empty(indices.numel(), dtype=torch.int32),
    ]


@torch.library.register_fake("torchrec_ext::catch_up")
def _catch_up_fake(weights: Tensor, *_: object) -> None:
    return None
