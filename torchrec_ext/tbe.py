"""FBGEMM's table-batched embedding module with the optimizers of torchrec_ext."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from torchrec_ext import any_width, bad_indices, empty_tables, ops
from torchrec_ext.autograd import FusedLookup, LookedUp, LookupInputs
from torchrec_ext.loaded_weights import LoadedWeights
from torchrec_ext.lookup_checks import check_lookup
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizer_clock import OptimizerClock
from torchrec_ext.optimizers import spec_of
from torchrec_ext.tbe_arguments import (
    check_mode,
    check_own_keywords,
    check_tables,
    check_types,
    max_gradient_of,
    split_keywords,
)
from torchrec_ext.variable_batch import check_batch_sizes, make_variable_batch


class TableBatchedEmbeddingBags(OptimizerClock):
    """Embedding tables that are looked up together and trained by a fused optimizer.

    FBGEMM does the forward, but for the lookup of tables on CUDA of which one has a dim that is no
    multiple of 4: that is ours. The backward updates weights and states in one op.

    ``optim_type`` is the optimizer; the inherited ``optimizer`` is ``EXACT_SGD`` throughout,
    because FBGEMM's forward branches on it.

    Args:
        embedding_specs: ``(rows, dim, location, compute device)`` of each table; dims are any on
            the CPU, up to 2048 on CUDA. Where a dim there is no multiple of 4, all tables are in
            ``EmbeddingLocation.DEVICE``.
        optimizer: The optimizer of all tables.
        rounding_seed: Key of the stochastic rounding of float16 weights.
        drop_bad_indices: Lookups whose index is outside of their table contribute nothing, in every
            bounds check mode and for every such index: a bag is pooled as if they were not there,
            without pooling they give a row of zeros, and no row is updated by them. On the CPU
            only. False: see ``docs/bad_input.md``.
        **keywords: FBGEMM's other keywords, with FBGEMM's defaults, and the optimizer's
            hyperparameters (see :mod:`torchrec_ext.optimizers`).

    Raises:
        TypeError: ``optimizer`` is no ``OptimType``, or a keyword is neither FBGEMM's nor a
            hyperparameter of the optimizer.
        HyperparameterError: A hyperparameter belongs to another optimizer or its value is not
            legal.
        ValueError: Dims, weights precision, devices or a mode on a device are not supported. All
            errors come before anything is allocated.

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
        drop_bad_indices: bool = False,
        **keywords: Any,
    ) -> None:
        spec = spec_of(optimizer)
        fbgemm_keywords, hyperparameters = split_keywords(spec, keywords)
        names = keywords.get("table_names") or [str(t) for t in range(len(embedding_specs))]
        try:
            resolved = spec.resolve(hyperparameters)
            max_gradient = max_gradient_of(fbgemm_keywords)
            check_types(fbgemm_keywords)
            check_own_keywords(
                {"rounding_seed": rounding_seed, "drop_bad_indices": drop_bad_indices}
            )
        except ValueError as error:  # HyperparameterError is one
            raise type(error)(f"tables {list(names)}: {error}") from error
        check_mode(embedding_specs, resolved, drop_bad_indices, names)
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
        self.drop_bad_indices = drop_bad_indices
        self._spec = spec
        self._states = spec.states_for(resolved)
        self._set_hyperparameters(resolved)
        self._max_gradient = max_gradient
        self.loaded_weights = LoadedWeights(
            self.derives_states, resolved.get("preserve_initial_weight", False)
        )
        self._allocate_states()
        self._register_layout()
        self._start_clock()
        self.reset_optimizer_states()

    # Dynamo would trace into FBGEMM's forward and lose what it leaves behind for the backward.
    @torch.compiler.disable
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
            batch_size_per_feature_per_rank: ``[features][ranks]``, batch sizes where they differ
                (VBE); needs pooling.
            total_unique_indices: Ignored, as by FBGEMM for every optimizer but NONE.
            **forward_arguments: FBGEMM's other arguments.

        Returns:
            ``[batch_size, sum of the features' dims]``, or ``[lookups, D]`` without pooling, of the
            output dtype. With variable batch sizes flat, rank by rank, feature by feature.

        Raises:
            NotImplementedError: FBGEMM's ``vbe_output`` or ``vbe_output_offsets`` was given.
            TypeError: A tensor has a wrong dtype; see :func:`~torchrec_ext.lookup_checks.
                check_lookup`.
            ValueError: A tensor has a wrong shape or device, per-sample weights or variable batch
                sizes come without pooling, or a lookup is in a table without rows.
            RuntimeError: FBGEMM found a bad index or bad offsets; names the table and the index.
        """
        variable = batch_size_per_feature_per_rank is not None
        check_lookup(self, indices, offsets, per_sample_weights, variable)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.float()
        if batch_size_per_feature_per_rank is not None:
            check_batch_sizes(self, batch_size_per_feature_per_rank, offsets, forward_arguments)
            if self.use_cpu:  # FBGEMM pads offsets as int64, into memory of their own dtype
                indices, offsets = indices.long(), offsets.long()
        lookups, good = indices.numel(), None
        if self.drop_bad_indices:
            good = bad_indices.keep_good(
                self, indices, offsets, per_sample_weights, batch_size_per_feature_per_rank
            )
            indices, offsets, per_sample_weights, _ = good
        inputs = LookupInputs(
            indices,
            offsets,
            feature_requires_grad,
            batch_size_per_feature_per_rank,
            forward_arguments,
        )
        placeholder = self.placeholder_autograd_tensor
        output = FusedLookup.apply(placeholder, per_sample_weights, self, inputs)
        if good is not None and self.pooling_mode == PoolingMode.NONE:
            return good.with_zero_rows(output, lookups)
        return output

    def _lookup(
        self, inputs: LookupInputs, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, LookedUp]:
        """FBGEMM's lookup; the lookups sorted, where they had to be sorted already."""
        indices, offsets = inputs.indices, inputs.offsets
        variable_batch = None
        if inputs.batch_sizes is not None:
            dims = [self.embedding_specs[table][1] for table in self.feature_table_map]
            variable_batch = make_variable_batch(inputs.batch_sizes, dims, indices.device)
        if self.use_cpu and self._features_without_rows:
            tables = [self.table_labels[table] for table in self.feature_table_map]
            empty_tables.check_no_lookups(
                self._features_without_rows, tables, indices, offsets, variable_batch
            )
        if self.use_cpu and self.total_hash_size == 0:  # a module without any row
            output = empty_tables.empty_lookup(self, offsets, inputs.batch_sizes)
            offsets = offsets.to(indices.dtype)
            return output, LookedUp(indices, offsets, None, None, variable_batch, [])
        segments: list[Tensor] = []
        if self._sleeping is not None:
            # The bounds check may rewrite indices; only then are they the rows that will be read.
            with bad_indices.explained(self, indices, offsets, inputs.batch_sizes):
                indices, offsets, per_sample_weights, _ = self.prepare_inputs(
                    indices, offsets, per_sample_weights, inputs.batch_sizes
                )
            segments = self._sorted(indices, offsets, variable_batch)
            self._wake(segments[0])
        forward = super().forward
        if self._looks_up_itself:
            forward = any_width.forward_of(self, variable_batch, inputs.batch_sizes)
        with bad_indices.explained(self, indices, offsets, inputs.batch_sizes):
            output = forward(
                indices,
                offsets,
                per_sample_weights,
                inputs.feature_requires_grad,
                inputs.batch_sizes,
                **inputs.forward_arguments,
            )
        locations = self.lxu_cache_locations
        looked_up = LookedUp(
            self._indices,
            self._offsets,
            per_sample_weights,
            locations if locations.numel() > 0 else None,
            variable_batch,
            segments,
        )
        return output, looked_up

    def _sorted(
        self, indices: Tensor, offsets: Tensor, variable_batch: ops.VariableBatch | None
    ) -> list[Tensor]:
        with self._tables_named_in_errors():
            return ops.sort_lookups(
                self._table_layout,
                self._feature_table_map,
                indices,
                offsets,
                variable_batch=variable_batch,
            )

    def _update(self, grad_output: Tensor, batch: LookedUp) -> None:
        self.loaded_weights.before_update()
        self.pull_learning_rate()
        with torch.no_grad(), self._tables_named_in_errors():
            ops.fused_update(
                grad_output,
                self._flat_weights,
                self._state_buffers(),
                self._table_layout,
                self._feature_table_map,
                batch.indices,
                batch.offsets,
                batch.per_sample_weights,
                segments=batch.segments,
                pooling_mode=int(self.pooling_mode),
                optimizer=self.optim_type,
                hyperparameters=self._kernel_hyperparameters,
                max_gradient=self._max_gradient,
                stochastic_rounding=self.stochastic_rounding,
                seed=self.rounding_seed,
                step=int(self.iter) if self.use_cpu else 0,  # a device has its own clock
                variable_batch=batch.variable_batch,
                tables=self._device_tables(batch),
                scalars=self._current_scalars(),
            )
            self._complete_update(batch.segments)

    def _per_sample_weight_grad(
        self, grad_output: Tensor, batch: LookedUp, feature_requires_grad: Tensor | None
    ) -> Tensor:
        with self._tables_named_in_errors():
            return ops.per_sample_weight_grad(
                grad_output,
                self._flat_weights.detach(),
                self._table_layout,
                self._feature_table_map,
                batch.indices,
                batch.offsets,
                feature_requires_grad,
                pooling_mode=int(self.pooling_mode),
                max_gradient=self._max_gradient,
                variable_batch=batch.variable_batch,
                tables=self._device_tables(batch),
            )

    def _device_tables(self, batch: LookedUp) -> ops.DeviceTables | None:
        if self._tables is None or self.weights_uvm.numel() == 0:
            return self._tables
        return dataclasses.replace(
            self._tables,
            managed_weights=self.weights_uvm.detach(),
            managed_states=self._state_buffers("uvm"),
            cache_weights=self.lxu_cache_weights,
            cache_locations=batch.cache_locations,
        )

    @contextlib.contextmanager
    def _tables_named_in_errors(self) -> Iterator[None]:
        """The ops know tables by number only."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"tables {self.table_labels}: {error}") from error

    def _register_layout(self) -> None:
        prefixes = ["weights", *(state.name for state in self._states)]
        layout = [
            [rows, dim, *(self._offset_in_buffers(prefix, table) for prefix in prefixes)]
            for table, (rows, dim, _, _) in enumerate(self.embedding_specs)
        ]
        self._table_layout = torch.tensor(layout, dtype=torch.int64, device="cpu")
        self._feature_table_map = torch.tensor(
            self.feature_table_map, dtype=torch.int64, device="cpu"
        )
        self._tables: ops.DeviceTables | None = None
        self._looks_up_itself = not (self.use_cpu or any_width.fbgemm_takes(self.embedding_specs))
        if not self.use_cpu:
            self._tables = ops.device_layout(
                self._table_layout, self._feature_table_map, self.current_device
            )
        self._features_without_rows = empty_tables.features_without_rows(self)
        if self.use_cpu:
            empty_tables.set_table_ends(self)
