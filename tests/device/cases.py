"""Batches for the ops, on any device. Imports neither FBGEMM nor TorchRec."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_ext import OptimType, ops
from torchrec_ext.optimizers import spec_of

from ..hyperparameters import HYPERPARAMETERS


@dataclasses.dataclass
class Case:
    """One call of ``fused_update``; its tensors are made on the CPU.

    Attributes:
        optimizer: Which update.
        hyperparameters: Besides those of ``HYPERPARAMETERS``.
        shapes: ``(rows, dim)`` of each table; every table has one feature.
        examples: The batch size.
        longest: Of the bags.
        hot: Lookups of row 0 of the first table, in a bag of their own.
        weight_dtype: Of the weights.
        gradient_dtype: Of the output gradient.
        index_dtype: Of indices and offsets.
        pooling_mode: ``ops.POOLING_SUM``, ``POOLING_MEAN`` or ``POOLING_NONE``.
        weighted: Whether there are per-sample weights.
        options: More keywords of ``fused_update``.
    """

    optimizer: OptimType
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: Sequence[tuple[int, int]] = ((50, 4), (3, 36), (2000, 64), (31, 100))
    examples: int = 200
    longest: int = 20
    hot: int = 0
    weight_dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    pooling_mode: int = ops.POOLING_SUM
    weighted: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Draws the tensors."""
        spec = spec_of(self.optimizer)
        resolved = spec.resolve({**HYPERPARAMETERS[self.optimizer], **self.hyperparameters})
        self.kernel_hyperparameters = spec.kernel_values(resolved)
        states = spec.states_for(resolved)
        sizes = [[rows * dim for rows, dim in self.shapes]]
        for state in states:
            sizes.append([rows if state.rowwise else rows * dim for rows, dim in self.shapes])
        starts = [[0, *itertools.accumulate(each)] for each in sizes]
        self.layout = torch.tensor(
            [[*shape, *(start[t] for start in starts)] for t, shape in enumerate(self.shapes)]
        )
        self.features = torch.arange(len(self.shapes))
        self.weights = torch.randn(starts[0][-1]).to(self.weight_dtype)
        self.states = [torch.rand(start[-1]) for start in starts[1:]]
        self._draw_lookups()

    def _draw_lookups(self) -> None:
        lengths = torch.randint(0, self.longest + 1, (len(self.shapes), self.examples))
        lengths[0, 0] += self.hot
        indices = torch.cat(
            [
                torch.randint(0, rows, (int(count.sum()),))
                for (rows, _), count in zip(self.shapes, lengths, strict=True)
            ]
        )
        indices[: self.hot] = 0
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        self.indices, self.offsets = indices.to(self.index_dtype), offsets.to(self.index_dtype)
        self.per_sample_weights = torch.randn(indices.numel()) if self.weighted else None
        shape = (self.examples, sum(dim for _, dim in self.shapes))
        if self.pooling_mode == ops.POOLING_NONE:
            shape = (indices.numel(), self.shapes[0][1])
        self.gradient = torch.randn(shape).to(self.gradient_dtype)

    def tensors(self, device: str) -> tuple[Any, ...]:
        """The positional arguments, on a device: gradient, weights, states and so on."""
        weighted = self.per_sample_weights
        gradient = self.gradient.float() if device == "cpu" else self.gradient
        return (
            gradient.to(device),
            self.weights.to(device, copy=True),
            [state.to(device, copy=True) for state in self.states],
            self.layout,
            self.features,
            self.indices.to(device),
            self.offsets.to(device),
            None if weighted is None else weighted.to(device),
        )

    def keywords(self) -> dict[str, Any]:
        """The other arguments."""
        return {
            "pooling_mode": self.pooling_mode,
            "optimizer": self.optimizer,
            "hyperparameters": self.kernel_hyperparameters,
            "step": 3,
            **self.options,
        }

    def run(self, device: str) -> list[Tensor]:
        """Updates on a device; gives weights and states, on the CPU."""
        tensors = self.tensors(device)
        ops.fused_update(*tensors, **self.keywords())
        return [tensors[1].cpu(), *(state.cpu() for state in tensors[2])]

    def run_weight_gradient(self, device: str) -> Tensor:
        """The gradient of the per-sample weights, on the CPU."""
        gradient, weights, _, layout, features, indices, offsets, _ = self.tensors(device)
        return ops.per_sample_weight_grad(
            gradient,
            weights,
            layout,
            features,
            indices,
            offsets,
            None,
            pooling_mode=self.pooling_mode,
        ).cpu()

    def run_lookup(self, device: str) -> Tensor:
        """The output of the lookup, on the CPU."""
        gradient, weights, _, layout, features, indices, offsets, weighted = self.tensors(device)
        output = torch.empty_like(gradient)
        ops.lookup(
            output,
            weights,
            layout,
            features,
            indices,
            offsets,
            weighted,
            pooling_mode=self.pooling_mode,
        )
        return output.cpu()

    def looked_up(self) -> Tensor:
        """The same, added up in float32, lookup by lookup."""
        output = torch.zeros(self.gradient.shape)
        first = 0
        for table, (rows, dim) in enumerate(self.shapes):
            start = int(self.layout[table, 2])
            weights = self.weights[start : start + rows * dim].view(rows, dim).float()
            for example in range(self.examples):
                bag = table * self.examples + example
                begin, end = self.offsets[bag : bag + 2].tolist()
                looked_up = weights[self.indices[begin:end].long()]
                if self.pooling_mode == ops.POOLING_NONE:
                    output[begin:end] = looked_up
                    continue
                if self.per_sample_weights is not None:
                    looked_up = looked_up * self.per_sample_weights[begin:end, None]
                pooled = output[example, first : first + dim]
                for row in looked_up:
                    pooled += row
                if self.pooling_mode == ops.POOLING_MEAN and end > begin:
                    pooled /= end - begin
            first += dim
        return output.to(self.gradient.dtype)
