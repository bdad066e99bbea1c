"""FBGEMM's table-batched embedding module with the optimizers of torchrec_ext."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    construct_split_state,
)
from torch import Tensor

from torchrec_ext import empty_tables, ops
from torchrec_ext.autograd import FusedLookup, LookupInputs
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import State, spec_of
from torchrec_ext.tbe_arguments import check_tables, max_gradient_of, split_keywords


class TableBatchedEmbeddingBags(SplitTableBatchedEmbeddingBagsCodegen):
    """Embedding tables that are looked up together and trained by a fused optimizer.

    FBGEMM does the forward; the backward updates weights and states in one op. ``optim_type`` is
    the optimizer; the inherited ``optimizer`` is ``EXACT_SGD`` throughout, because FBGEMM's forward
    branches on it.

    The optimizer's step clock (the buffer ``iter``) counts completed backwards. Forwards leave it
    alone.

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
        resolved = spec.resolve(hyperparameters)
        max_gradient = max_gradient_of(fbgemm_keywords)
        check_tables(embedding_specs, fbgemm_keywords)
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
        self._set_hyperparameters(resolved)
        self._max_gradient = max_gradient
        for state in spec.states:
            split = construct_split_state(
                self.embedding_specs, rowwise=state.rowwise, cacheable=False
            )
            self._apply_split(split, prefix=state.name, dtype=torch.float32)
        self._register_layout()
        self.reset_optimizer_states()

    @property
    def hyperparameters(self) -> Mapping[str, float]:
        """The hyperparameters in force; :meth:`update_hyper_parameters` changes them."""
        return MappingProxyType(self._hyperparameters)

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
            per_sample_weights: ``[lookups]`` or None; gets a gradient where it requires one. Needs
                pooling.
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
                f"tables {self._names()}: variable batch sizes (VBE) are not supported; "
                "give every feature the same batch size"
            )
        if per_sample_weights is not None:
            if self.pooling_mode == PoolingMode.NONE:
                raise ValueError(
                    f"tables {self._names()}: per_sample_weights need sum or mean pooling"
                )
            per_sample_weights = per_sample_weights.float()
        inputs = LookupInputs(indices, offsets, feature_requires_grad, forward_arguments)
        return FusedLookup.apply(self.placeholder_autograd_tensor, per_sample_weights, self, inputs)

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The states as views, ``[table][state]``, in the order of the optimizer's spec."""
        return [
            [self._state_of_table(state, table) for state in self._spec.states]
            for table in range(len(self.embedding_specs))
        ]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """The states as views, one dict by state name for each table."""
        names = [state.name for state in self._spec.states]
        return [dict(zip(names, states, strict=True)) for states in self.split_optimizer_states()]

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate of the next update.

        Raises:
            HyperparameterError: The optimizer does not allow the value.
        """
        self.update_hyper_parameters({"learning_rate": lr})

    def get_learning_rate(self) -> float:
        """The learning rate, exactly as it was set."""
        return self._hyperparameters["learning_rate"]

    def update_hyper_parameters(self, params_dict: Mapping[str, float]) -> None:
        """Changes hyperparameters from the next update on. States are not touched.

        Args:
            params_dict: Values by name; ``lr`` is the learning rate.

        Raises:
            HyperparameterError: A name is unknown or a value is not legal; nothing was changed.
        """
        self._set_hyperparameters(self._spec.resolve(params_dict, base=self._hyperparameters))

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of completed updates.

        Raises:
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(
                f"tables {self._names()}: step={step} is not legal; it must be an integer >= 0"
            )
        super().set_optimizer_step(step)

    @torch.no_grad()
    def reset_optimizer_states(
        self, table: int | str | None = None, rows: Tensor | Iterable[int] | None = None
    ) -> None:
        """Sets states to the initial values that the current hyperparameters give.

        Args:
            table: Number or name of a table; None for all tables.
            rows: Rows of that table; None for all rows.

        Raises:
            KeyError: There is no such table.
            IndexError: There is no such row; nothing was changed.
            ValueError: ``rows`` without ``table``.
        """
        if table is None and rows is not None:
            raise ValueError(f"rows={rows!r} needs a table: one of {self._names()}")
        tables = range(len(self.embedding_specs)) if table is None else [self._table_number(table)]
        for number in tables:
            selected = slice(None) if rows is None else self._checked_rows(number, rows)
            for state in self._spec.states:
                value = self._spec.initial_value(state, self._hyperparameters)
                self._state_of_table(state, number)[selected] = value

    @torch.no_grad()
    def reset_embedding_weight_momentum(
        self,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        """Zeroes the weights of pruned rows and resets their optimizer states, for every optimizer.

        Args:
            pruned_indices: int64, the rows, table by table.
            pruned_indices_offsets: int64 ``[pruned tables + 1]``, where each table's rows start.
            logical_table_ids: Not read: FBGEMM's numbering outside of this module.
            buffer_ids: ``[pruned tables]``, the numbers of the tables in this module.
        """
        weights = self.split_embedding_weights()
        bounds = pruned_indices_offsets.tolist()
        for table, begin, end in zip(buffer_ids.tolist(), bounds, bounds[1:], strict=False):
            rows = pruned_indices[begin:end].long()
            self.reset_optimizer_states(table, rows)
            weights[table][rows] = 0

    def _lookup(self, inputs: LookupInputs, per_sample_weights: Tensor | None) -> Tensor:
        indices, offsets = inputs.indices, inputs.offsets
        if self._features_without_rows:
            tables = [self._names()[table] for table in self.feature_table_map]
            empty_tables.check_no_lookups(self._features_without_rows, tables, indices, offsets)
        if self.total_hash_size == 0:  # FBGEMM cannot look up in a module without any row
            self._indices, self._offsets = indices, offsets.to(indices.dtype)
            return empty_tables.empty_lookup(self, offsets)
        return super().forward(
            indices,
            offsets,
            per_sample_weights,
            inputs.feature_requires_grad,
            **inputs.forward_arguments,
        )

    def _update(
        self,
        grad_output: Tensor,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
    ) -> None:
        with torch.no_grad():
            ops.fused_update(
                grad_output,
                self.weights_host,
                [getattr(self, f"{state.name}_host") for state in self._spec.states],
                self._table_layout,
                self._feature_table_map,
                indices,
                offsets,
                per_sample_weights,
                pooling_mode=int(self.pooling_mode),
                optimizer=self.optim_type,
                hyperparameters=self._kernel_hyperparameters,
                max_gradient=self._max_gradient,
                stochastic_rounding=self.stochastic_rounding,
                seed=self.rounding_seed,
                step=int(self.iter),
            )
            self.iter += 1

    def _per_sample_weight_grad(
        self,
        grad_output: Tensor,
        indices: Tensor,
        offsets: Tensor,
        feature_requires_grad: Tensor | None,
    ) -> Tensor:
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

    def _set_hyperparameters(self, resolved: dict[str, float]) -> None:
        self._hyperparameters = resolved
        self._kernel_hyperparameters = [
            resolved[name] for name in self._spec.kernel_hyperparameters
        ]
        self._set_learning_rate(resolved["learning_rate"])  # FBGEMM's own copy, in float32

    def _register_layout(self) -> None:
        offsets = [self.weights_physical_offsets] + [
            getattr(self, f"{state.name}_physical_offsets") for state in self._spec.states
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

    def _state_of_table(self, state: State, table: int) -> Tensor:
        rows, dim, _, _ = self.embedding_specs[table]
        shape = (rows,) if state.rowwise else (rows, dim)
        size = rows if state.rowwise else rows * dim
        offset = getattr(self, f"{state.name}_physical_offsets")[table]
        buffer: Tensor = getattr(self, f"{state.name}_host")
        return buffer.detach()[offset : offset + size].view(shape)

    def _names(self) -> list[str]:
        return self.table_names or [str(number) for number in range(len(self.embedding_specs))]

    def _table_number(self, table: int | str) -> int:
        names = self._names()
        number = names.index(table) if isinstance(table, str) and table in names else table
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise KeyError(f"there is no table {table!r}; the tables are {names}")
        return number

    def _checked_rows(self, table: int, rows: Tensor | Iterable[int]) -> Tensor:
        selected = rows if isinstance(rows, Tensor) else torch.tensor(list(rows), dtype=torch.int64)
        limit = self.embedding_specs[table][0]
        if selected.numel() and (int(selected.min()) < 0 or int(selected.max()) >= limit):
            raise IndexError(
                f"table {self._names()[table]!r} has rows 0 to {limit - 1}, but rows "
                f"{int(selected.min())} to {int(selected.max())} were given"
            )
        return selected
