"""The weights that FTRL's states stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrec_ext import ops

if TYPE_CHECKING:
    from torchrec_ext.tbe import TableBatchedEmbeddingBags


@torch.no_grad()
def write_weights_of_states(
    module: TableBatchedEmbeddingBags, weights: Tensor, states: Sequence[Tensor], rows: Tensor
) -> None:
    """Gives rows the weights that follow from their states; rounded to nearest.

    Args:
        module: Of an optimizer that computes weights from states; its hyperparameters are used.
        weights: ``[rows, D]``, contiguous; they stay where the denominator is 0.
        states: ``[rows, D]`` each, contiguous.
        rows: int64, which of them. Rows that wait for their first update are not meant here.
    """
    if rows.numel() == 0:
        return
    count, dim = weights.shape
    # An update without a gradient, which the shrinkage would make one of its own.
    values = {**module.hyperparameters, "l2_shrinkage_reg": 0.0}
    ops.fused_update(
        torch.zeros(1, dim, device=weights.device),
        weights.view(-1),
        [state.view(-1) for state in states],
        torch.tensor([[count, dim, 0, *(0 for _ in states)]]),
        torch.zeros(1, dtype=torch.int64),
        rows,
        torch.tensor([0, rows.numel()], device=rows.device),
        None,
        pooling_mode=ops.POOLING_SUM,
        optimizer=module.optim_type,
        hyperparameters=module._spec.kernel_values(values),
    )
