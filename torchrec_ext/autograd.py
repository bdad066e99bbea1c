"""The autograd function that puts the fused update behind FBGEMM's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchrec_ext.ops import VariableBatch

if TYPE_CHECKING:
    from torchrec_ext.tbe import TableBatchedEmbeddingBags


class LookupInputs(NamedTuple):
    """The inputs of one forward that need no gradient."""

    indices: Tensor
    offsets: Tensor
    feature_requires_grad: Tensor | None
    batch_sizes: list[list[int]] | None
    forward_arguments: dict[str, Any]


class LookedUp(NamedTuple):
    """A batch as the backward sees it: FBGEMM's bounds check may have rewritten it."""

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    cache_locations: Tensor | None
    variable_batch: VariableBatch | None
    segments: list[Tensor]


class FusedLookup(torch.autograd.Function):
    """Forward: FBGEMM's lookup. Backward: one fused optimizer step on the rows looked up.

    The weights are no inputs and get no gradient: ``placeholder`` is what makes the output require
    one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        placeholder: Tensor,
        per_sample_weights: Tensor | None,
        module: TableBatchedEmbeddingBags,
        inputs: LookupInputs,
    ) -> Tensor:
        """Looks up ``[batch_size, sum of dims]``, or ``[lookups, D]`` without pooling."""
        output, looked_up = module._lookup(inputs, per_sample_weights)
        ctx.module = module
        ctx.save_for_backward(
            looked_up.indices,
            looked_up.offsets,
            per_sample_weights,
            looked_up.cache_locations,
            inputs.feature_requires_grad,
        )
        ctx.variable_batch = looked_up.variable_batch
        ctx.segments = looked_up.segments
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Updates weights and states; returns the gradient of the per-sample weights."""
        indices, offsets, per_sample_weights, locations, feature_requires_grad = ctx.saved_tensors
        looked_up = LookedUp(
            indices, offsets, per_sample_weights, locations, ctx.variable_batch, ctx.segments
        )
        if not grad_output.is_cuda:  # the kernels there read other dtypes and copy what they must
            grad_output = grad_output.to(torch.float32).contiguous()
        if ctx.segments:  # another backward may have moved the clock since the forward
            ctx.module._wake(ctx.segments[0])
        weight_grad = None
        if ctx.needs_input_grad[1]:  # before the update changes the weights that it is made of
            weight_grad = ctx.module._per_sample_weight_grad(
                grad_output, looked_up, feature_requires_grad
            )
        ctx.module._update(grad_output, looked_up)
        return None, weight_grad, None, None
