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
def weights_of_states(
    module: TableBatchedEmbeddingBags, weights: Tensor, states: Sequence[Tensor]
) -> Tensor:
    """Computes weights from states, under a module's hyperparameters; rounded to nearest.

    Args:
        module: Of an optimizer that computes weights from states.
        weights: ``[rows, D]``, which stay where the denominator is 0.
        states: ``[rows, D]`` each. Rows that wait for their first update are not meant here.

    Returns:
        ``[rows, D]``, of the dtype of ``weights``. The arguments are left as they are.
    """
    rows, dim = weights.shape
    weights, states = weights.clone(), [state.clone() for state in states]
    if rows == 0:
        return weights
    # An update without a gradient, which the shrinkage would make one of its own.
    values = {**module.hyperparameters, "l2_shrinkage_reg": 0.0}
    ops.fused_update(
        torch.zeros(1, dim, device=weights.device),
        weights.view(-1),
        [state.view(-1) for state in states],
        torch.tensor([[rows, dim, 0, *(0 for _ in states)]]),
        torch.zeros(1, dtype=torch.int64),
        torch.arange(rows, device=weights.device),
        torch.tensor([0, rows], device=weights.device),
        None,
        pooling_mode=ops.POOLING_SUM,
        optimizer=module.optim_type,
        hyperparameters=module._spec.kernel_values(values),
    )
    return weights
