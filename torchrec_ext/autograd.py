"""The autograd function that puts the fused update behind FBGEMM's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchrec_ext.tbe import TableBatchedEmbeddingBags


class LookupInputs(NamedTuple):
    """The inputs of one forward that need no gradient."""

    indices: Tensor
    offsets: Tensor
    feature_requires_grad: Tensor | None
    forward_arguments: dict[str, Any]


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
        output, segments = module._lookup(inputs, per_sample_weights)
        ctx.module = module
        ctx.pooling_mode = int(module.pooling_mode)
        # FBGEMM's bounds check may have rewritten indices and offsets: its own copies are what it
        # looked up.
        ctx.save_for_backward(
            module._indices, module._offsets, per_sample_weights, inputs.feature_requires_grad
        )
        ctx.segments = segments
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Updates weights and states; returns the gradient of the per-sample weights."""
        indices, offsets, per_sample_weights, feature_requires_grad = ctx.saved_tensors
        grad_output = grad_output.to(torch.float32).contiguous()
        if ctx.segments:  # another backward may have moved the clock since the forward
            ctx.module._wake(ctx.segments[0])
        weight_grad = None
        if ctx.needs_input_grad[1]:  # before the update changes the weights that it is made of
            weight_grad = ctx.module._per_sample_weight_grad(
                grad_output, indices, offsets, feature_requires_grad
            )
        ctx.module._update(grad_output, indices, offsets, per_sample_weights, ctx.segments)
        return None, weight_grad, None, None
