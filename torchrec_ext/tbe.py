"""FBGEMM's table-batched embedding module with the optimizers of torchrec_ext."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from torchrec_ext import empty_tables, ops
from torchrec_ext.autograd import FusedLookup, LookupInputs
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizer_clock import OptimizerClock
from torchrec_ext.optimizers import HyperparameterError, spec_of
from torchrec_ext.tbe_arguments import check_tables, max_gradient_of, split_keywords


class TableBatchedEmbeddingBags(OptimizerClock):
    """Embedding tables that are looked up together and trained by a fused optimizer.

    FBGEMM does the forward; the backward updates weights and states in one op. ``optim_type`` is
    the optimizer; the inherited ``optimizer`` is ``EXACT_SGD`` throughout, because FBGEMM's forward
    branches on it.

    Args:
        embedding_specs: ``(rows, dim, location, compute device)`` of each table; dims are multiples
            of 4.
        optimizer: The optimizer of all tables.
        rounding_seed: Key of the stochastic rounding of float16 weights.
        **keywords: FBGEMM's other keywords, with FBGEMM's defaults, and the optimizer's
            hyperparameters (see :mod:`torchrec_ext.optimizers`).

    Raises:
        TypeError: ``optimizer`` is no ``OptimType``, or a keyword is neither FBGEMM's nor a
            hyperparameter of the optimizer.
        HyperparameterError: A hyperparameter belongs to another optimizer or its value is not
            legal.
        ValueError: Dims, weights precision or devices are not supported. All errors come before
            anything is allocated.

    Example:
        >>> import torch
        >>> from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        >>> from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
        >>> from torchrec_ext import OptimType
        >>> from torchrec_ext.tbe import TableBatchedEmbeddingBags
        >>> tbe = TableBatchedEmbeddingBags(
        ...     [(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        ...     optimizer=OptimType.FTRL, learning_rate=0.1, ftrl_beta=1.0, l1_reg=0.5,
        ... )
        >>> tbe(torch.tensor([3]), torch.tensor([0, 1])).sum().backward()
        >>> tbe.split_embedding_weights()[0][3]
        tensor([-0.0250, -0.0250, -0.0250, -0.0250])
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, Any, ComputeDevice]],
        feature_table_map: list[int] | None = None,
        *,
        optimizer: OptimType,
        rounding_seed: int = 0,
        **keywords: Any,
    ) -> None:
        spec = spec_of(optimizer)
        fbgemm_keywords, hyperparameters = split_keywords(spec, keywords)
        try:
            resolved = spec.resolve(hyperparameters)
        except HyperparameterError as error:
            names = keywords.get("table_names") or list(range(len(embedding_specs)))
            raise HyperparameterError(f"tables {list(names)}: {error}") from error
        if not isinstance(rounding_seed, int):
            raise ValueError(f"rounding_seed={rounding_seed!r} is not legal; it must be an integer")
        max_gradient = max_gradient_of(fbgemm_keywords)
        check_tables(embedding_specs, feature_table_map, fbgemm_keywords)
        super().__init__(
            list(embedding_specs),
            feature_table_map,
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=resolved["learning_rate"],
            **fbgemm_keywords,
        )
        self.optim_type = optimizer
        self.rounding_seed = rounding_seed
        self._spec = spec
        self._states = spec.states_for(resolved)
        self._set_hyperparameters(resolved)
        self._max_gradient = max_gradient
        self._allocate_states()
        self._register_layout()
        self._start_clock()
        self.reset_optimizer_states()

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        **forward_arguments: Any,
    ) -> Tensor:
        """Looks up and pools rows.

        Args:
            indices: int32 or int64 ``[lookups]``, feature by feature.
            offsets: ``[features * batch_size + 1]``.
            per_sample_weights: ``[lookups]`` or None; gets a gradient where it requires one, taken
                with the weights at the time of the backward. Needs pooling.
            feature_requires_grad: int32 ``[features]``, features whose per-sample weights get a
                gradient; None: all.
            batch_size_per_feature_per_rank: Not supported: variable batch sizes.
            total_unique_indices: Ignored, as by FBGEMM for every optimizer but NONE.
            **forward_arguments: FBGEMM's other arguments.

        Returns:
            ``[batch_size, sum of the features' dims]``, or ``[lookups, D]`` without pooling, of the
            output dtype.

        Raises:
            NotImplementedError: Variable batch sizes were asked for.
            ValueError: Per-sample weights without pooling, or a lookup in a table without rows.
        """
        if batch_size_per_feature_per_rank is not None:
            raise NotImplementedError(
                f"tables {self.table_labels}: variable batch sizes (VBE) are not supported; "
                "give every feature the same batch size"
            )
        if per_sample_weights is not None:
            if self.pooling_mode == PoolingMode.NONE:
                raise ValueError(
                    f"tables {self.table_labels}: per_sample_weights need sum or mean pooling"
                )
            per_sample_weights = per_sample_weights.float()
        inputs = LookupInputs(indices, offsets, feature_requires_grad, forward_arguments)
        return FusedLookup.apply(self.placeholder_autograd_tensor, per_sample_weights, self, inputs)

    def _lookup(
        self, inputs: LookupInputs, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """FBGEMM's lookup, and the sorted lookups where they had to be sorted already."""
        indices, offsets = inputs.indices, inputs.offsets
        if self._features_without_rows:
            tables = [self.table_labels[table] for table in self.feature_table_map]
            empty_tables.check_no_lookups(self._features_without_rows, tables, indices, offsets)
        if self.total_hash_size == 0:  # FBGEMM cannot look up in a module without any row
            self._indices, self._offsets = indices, offsets.to(indices.dtype)
            return empty_tables.empty_lookup(self, offsets), []
        segments: list[Tensor] = []
        if self._sleeping is not None:
            # The bounds check may rewrite indices; only then are they the rows that will be read.
            indices, offsets, per_sample_weights, _ = self.prepare_inputs(
                indices, offsets, per_sample_weights
            )
            segments = self._sorted(indices, offsets)
            self._wake(segments[0])
        output = super().forward(
            indices,
            offsets,
            per_sample_weights,
            inputs.feature_requires_grad,
            **inputs.forward_arguments,
        )
        return output, segments

    def _sorted(self, indices: Tensor, offsets: Tensor) -> list[Tensor]:
        with self._tables_named_in_errors():
            return ops.sort_lookups(self._table_layout, self._feature_table_map, indices, offsets)

    def _update(
        self,
        grad_output: Tensor,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        segments: list[Tensor],
    ) -> None:
        with torch.no_grad(), self._tables_named_in_errors():
            ops.fused_update(
                grad_output,
                self.weights_host,
                self._state_buffers(),
                self._table_layout,
                self._feature_table_map,
                indices,
                offsets,
                per_sample_weights,
                segments=segments,
                pooling_mode=int(self.pooling_mode),
                optimizer=self.optim_type,
                hyperparameters=self._kernel_hyperparameters,
                max_gradient=self._max_gradient,
                stochastic_rounding=self.stochastic_rounding,
                seed=self.rounding_seed,
                step=int(self.iter),
            )
            self._complete_update(segments)

    def _per_sample_weight_grad(
        self,
        grad_output: Tensor,
        indices: Tensor,
        offsets: Tensor,
        feature_requires_grad: Tensor | None,
    ) -> Tensor:
        with self._tables_named_in_errors():
            return ops.per_sample_weight_grad(
                grad_output,
                self.weights_host.detach(),
                self._table_layout,
                self._feature_table_map,
                indices,
                offsets,
                feature_requires_grad,
                pooling_mode=int(self.pooling_mode),
                max_gradient=self._max_gradient,
            )

    @contextlib.contextmanager
    def _tables_named_in_errors(self) -> Iterator[None]:
        """The ops know tables by number only."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"tables {self.table_labels}: {error}") from error

    def _register_layout(self) -> None:
        offsets = [self.weights_physical_offsets] + [
            getattr(self, f"{state.name}_physical_offsets") for state in self._states
        ]
        layout = [
            [rows, dim, *(offset[table] for offset in offsets)]
            for table, (rows, dim, _, _) in enumerate(self.embedding_specs)
        ]
        self._table_layout = torch.tensor(layout, dtype=torch.int64)
        self._feature_table_map = torch.tensor(self.feature_table_map, dtype=torch.int64)
        self._features_without_rows = empty_tables.features_without_rows(self)
        if self._features_without_rows:
            empty_tables.guard_table_ends(self)
