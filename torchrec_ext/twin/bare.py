"""A twin of bare modules: ours and FBGEMM's, without TorchRec."""

from __future__ import annotations

from collections.abc import Iterator

from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from torchrec_ext.tbe import TableBatchedEmbeddingBags
from torchrec_ext.twin.compare import Difference, Values, compare
from torchrec_ext.twin.description import Batch, Description

_POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, "none": PoolingMode.NONE}
_PRECISION = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
_PLACE = {
    "cpu": (EmbeddingLocation.HOST, ComputeDevice.CPU),
    "cuda": (EmbeddingLocation.DEVICE, ComputeDevice.CUDA),
}


class BareTwin:
    """Our module and FBGEMM's, made from one description, with the same weights and states.

    Attributes:
        ours: The module of torchrec_ext.
        theirs: FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen``.

    Example:
        >>> from torchrec_ext import OptimType
        >>> from torchrec_ext.twin import BareTwin, Description, Table, largest
        >>> description = Description((Table("user", 100, 8),), OptimType.EXACT_ADAGRAD)
        >>> largest(BareTwin(description).run(steps=3)).value < 1e-5
        True
    """

    def __init__(self, description: Description) -> None:
        """Builds both modules."""
        self.description = description
        keywords = {
            "embedding_specs": [
                (table.rows, table.dim, *_PLACE[description.device]) for table in description.tables
            ],
            "feature_table_map": description.feature_table_map,
            "pooling_mode": _POOLING[description.pooling],
            "weights_precision": _PRECISION[description.weights_precision],
            "stochastic_rounding": False,
            "table_names": [table.name for table in description.tables],
            **description.clipping,
        }
        self.ours = TableBatchedEmbeddingBags(
            optimizer=description.optimizer, **keywords, **description.hyperparameters
        )
        self.theirs = SplitTableBatchedEmbeddingBagsCodegen(
            optimizer=description.optimizer.counterpart,
            **keywords,
            **description.fbgemm_hyperparameters,
        )
        self._start_alike()

    def run(self, steps: int) -> Iterator[Difference]:
        """Trains both on the description's batches and compares them after every step."""
        for step, batch in enumerate(self.description.batches(steps), start=1):
            ours, theirs, gradient = self._forward(batch)
            yield from compare(
                step,
                self._trained(self.ours, ours, gradient, batch),
                self._trained(self.theirs, theirs, gradient, batch),
            )

    def _start_alike(self) -> None:
        for half in (self.ours, self.theirs):
            for weight, value in zip(
                half.split_embedding_weights(), self.description.weights(), strict=True
            ):
                weight.copy_(value)
        for mine, other in zip(
            self.ours.get_optimizer_state(), self._states(self.theirs), strict=True
        ):
            for name, state in mine.items():
                other[name].copy_(state)

    def _forward(self, batch: Batch) -> tuple[tuple, tuple, Tensor]:
        results = []
        for half in (self.ours, self.theirs):
            weights = None if batch.weights is None else batch.weights.clone().requires_grad_()
            output = half(batch.indices.clone(), batch.offsets, weights)
            results.append((output, weights))
        return results[0], results[1], batch.gradient(results[0][0])

    def _trained(
        self,
        half: SplitTableBatchedEmbeddingBagsCodegen,
        forward: tuple[Tensor, Tensor | None],
        gradient: Tensor,
        batch: Batch,
    ) -> Values:
        """Runs the backward; gives output, weights, states and the weights' gradient."""
        output, weights = forward
        values = {("output", ""): output.detach().clone()}
        output.backward(gradient)
        if weights is not None and weights.grad is not None:
            values["weight gradient", ""] = weights.grad[:, None]
        tables = self.description.tables
        for table, weight in zip(tables, half.split_embedding_weights(), strict=True):
            values["weight", table.name] = weight
        for table, states in zip(tables, self._states(half), strict=True):
            for name, state in states.items():
                values[name, table.name] = state if state.dim() == 2 else state[:, None]
        return values

    def _states(self, half: SplitTableBatchedEmbeddingBagsCodegen) -> list[dict[str, Tensor]]:
        # FBGEMM gives no entries at all for an optimizer without states.
        return half.get_optimizer_state() or [{} for _ in self.description.tables]
