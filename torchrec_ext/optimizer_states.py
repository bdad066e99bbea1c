"""The optimizer states of a module's tables: allocation, views and initial values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitState,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from torchrec_ext import any_width, host_memory
from torchrec_ext.loaded_weights import LoadedWeights
from torchrec_ext.optimizers import OptimizerSpec, State

# Bounds the memory that deriving states takes.
_ROWS_AT_ONCE = 65536


class OptimizerStates(SplitTableBatchedEmbeddingBagsCodegen):
    """The part of our module that owns the optimizer states.

    A state is one flat buffer over all tables, named and placed as FBGEMM does it. Its
    initial value comes from the optimizer's spec and the hyperparameters in force.
    """

    _spec: OptimizerSpec
    _states: tuple[State, ...]
    _hyperparameters: dict[str, Any]
    loaded_weights: LoadedWeights

    def __init__(
        self, embedding_specs: Sequence[tuple[int, int, Any, Any]], *arguments: Any, **keywords: Any
    ) -> None:
        """Builds FBGEMM's module; on the host its tables have any width."""
        construct = any_width.constructor_of(self, embedding_specs)
        construct(list(embedding_specs), *arguments, **keywords)

    @property
    def table_labels(self) -> list[str]:
        """The tables' names, or their numbers where they have none."""
        return self.table_names or [str(table) for table in range(len(self.embedding_specs))]

    @property
    def derives_states(self) -> bool:
        """Whether weights are computed from a state, which then follows from the weights."""
        return self._spec.derive is not None

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The states as views, ``[table][state]``, in the order of the optimizer's spec."""
        return [
            [self._state_of_table(state, table) for state in self._states]
            for table in range(len(self.embedding_specs))
        ]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """The states as views, one dict by state name for each table."""
        names = [state.name for state in self._states]
        return [dict(zip(names, states, strict=True)) for states in self.split_optimizer_states()]

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
        for number, selected in self._selected(table, rows):
            for state in self._states:
                value = self._spec.initial_value(state, self._hyperparameters)
                self._state_of_table(state, number)[selected] = value
        self._note_states(table, rows)

    @torch.no_grad()
    def derive_optimizer_states(
        self, table: int | str | None = None, rows: Tensor | Iterable[int] | None = None
    ) -> None:
        """Rewrites states that follow from the weights: FTRL's ``linear``.

        For weights that were loaded or written without the states that belong to them. FTRL
        computes a weight from ``linear`` and ``accum`` alone, so the next update of a row would
        return to what its ``linear`` stands for. Afterwards ``linear`` stands for the weights that
        are there, by the equations of :mod:`torchrec_ext.optimizers.ftrl`, under the
        hyperparameters in force; ``accum``, and so each weight's learning rate, stays. With
        ``preserve_initial_weight=True`` the rows count as never updated instead, and get their
        ``linear`` in their next update.

        Args:
            table: As in :meth:`reset_optimizer_states`.
            rows: As in :meth:`reset_optimizer_states`.

        Raises:
            KeyError: As :meth:`reset_optimizer_states`.
            IndexError: As :meth:`reset_optimizer_states`; nothing was changed.
            ValueError: As :meth:`reset_optimizer_states`, or the optimizer has no state that
                follows from the weights.
        """
        derive = self._spec.derive
        if derive is None:
            raise ValueError(
                f"tables {self.table_labels}: no state of {self._spec.optimizer.name} follows from "
                "the weights; load its states, or call reset_optimizer_states()"
            )
        selections = self._selected(table, rows)
        self.flush()
        weights = self.split_embedding_weights()
        for number, selected in selections:
            states = [self._state_of_table(state, number) for state in self._states]
            numbers = torch.arange(len(weights[number])) if rows is None else selected
            for some in numbers.split(_ROWS_AT_ONCE):
                parts = [state[some] for state in states]
                derive(weights[number][some], parts, self._hyperparameters)
                for state, part in zip(states, parts, strict=True):
                    state[some] = part
        self._note_states(table, rows)

    def _note_states(self, table: int | str | None, rows: Any) -> None:
        if rows is None:
            labels = self.table_labels
            written = labels if table is None else [labels[self._table_number(table)]]
            self.loaded_weights.states_written(written)

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
            pruned_indices: int64, groups of rows one after another.
            pruned_indices_offsets: int64 ``[groups + 1]``, where each group starts.
            logical_table_ids: ``[pruned tables]``, for each table one of the features that read it,
                by the feature's number in this module.
            buffer_ids: ``[pruned tables]``, the group of each table's rows.

        Raises:
            IndexError: There is no such row; nothing of that table was changed.
        """
        cached = self.lxu_cache_weights.numel() > 0
        if cached:
            self.flush()
        weights = self.split_embedding_weights()
        bounds = pruned_indices_offsets.tolist()
        pruned = zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True)
        for feature, group in pruned:
            table = self.feature_table_map[feature]
            rows = pruned_indices[bounds[group] : bounds[group + 1]].long()
            self.reset_optimizer_states(table, rows)
            weights[table][rows] = 0
        if cached:  # FBGEMM's cache would go on serving the rows as they were
            self.reset_cache_states()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``to``, ``half`` and so on: states move with the module, but stay float32."""
        kinds = ("host", "dev", "uvm")
        names = [f"{state.name}_{kind}" for state in self._states for kind in kinds]
        before = {name: getattr(self, name).detach() for name in names if hasattr(self, name)}
        super()._apply(fn, recurse)
        for name, state in before.items():
            after = getattr(self, name)
            if after.dtype != state.dtype:
                after.data = state.to(after.device)
        return self

    def _allocate_states(self) -> None:
        for state in self._states:
            split = any_width.construct_split_state(
                self.embedding_specs, rowwise=state.rowwise, cacheable=False
            )
            self._apply_split(split, prefix=state.name, dtype=state.dtype)

    def _apply_split(self, split: SplitState, prefix: str, dtype: Any, **keywords: Any) -> None:
        """FBGEMM allocates weights and states through this method, of which it asks zeros."""
        on_host = split.host_size > 0 and self.current_device.type == "cpu"
        if on_host and keywords.get("preallocated_host_buffer") is None:
            keywords["preallocated_host_buffer"] = host_memory.zeros(split.host_size, dtype)
        super()._apply_split(split, prefix, dtype, **keywords)

    @property
    def _buffers_kind(self) -> str:
        """The suffix of FBGEMM's flat buffers, other than those in managed memory (``uvm``)."""
        return "host" if self.use_cpu else "dev"

    @property
    def _flat_weights(self) -> Tensor:
        return getattr(self, f"weights_{self._buffers_kind}")

    def place_of_weights(self, table: int) -> tuple[Tensor, int]:
        """The flat buffer that a table's weights are in, and where they begin there."""
        kind = "uvm" if self._is_managed("weights", table) else self._buffers_kind
        return getattr(self, f"weights_{kind}"), self.weights_physical_offsets[table]

    def _state_buffers(self, kind: str | None = None) -> list[Tensor]:
        return [
            getattr(self, f"{state.name}_{kind or self._buffers_kind}") for state in self._states
        ]

    def _is_managed(self, prefix: str, table: int) -> bool:
        placement = getattr(self, f"{prefix}_physical_placements")[table]
        return placement in (EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING)

    def _offset_in_buffers(self, prefix: str, table: int) -> int:
        """Where a table begins, counted through the flat buffer and then the managed one."""
        offset: int = getattr(self, f"{prefix}_physical_offsets")[table]
        first: Tensor = getattr(self, f"{prefix}_{self._buffers_kind}")
        return offset + first.numel() if self._is_managed(prefix, table) else offset

    def _state_of_table(self, state: State, table: int) -> Tensor:
        rows, dim, _, _ = self.embedding_specs[table]
        shape = (rows,) if state.rowwise else (rows, dim)
        size = rows if state.rowwise else rows * dim
        offset = getattr(self, f"{state.name}_physical_offsets")[table]
        kind = "uvm" if self._is_managed(state.name, table) else self._buffers_kind
        buffer: Tensor = getattr(self, f"{state.name}_{kind}")
        return buffer.detach()[offset : offset + size].view(shape)

    def _table_number(self, table: int | str) -> int:
        names = self.table_labels
        number = names.index(table) if isinstance(table, str) and table in names else table
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise KeyError(f"there is no table {table!r}; the tables are {names}")
        return number

    def _selected(
        self, table: int | str | None, rows: Tensor | Iterable[int] | None
    ) -> list[tuple[int, Any]]:
        """The numbers of the tables, each with its rows as an index."""
        if table is None and rows is not None:
            raise ValueError(f"rows={rows!r} needs a table: one of {self.table_labels}")
        tables = range(len(self.embedding_specs)) if table is None else [self._table_number(table)]
        return [
            (number, slice(None) if rows is None else self._checked_rows(number, rows))
            for number in tables
        ]

    def _checked_rows(self, table: int, rows: Tensor | Iterable[int]) -> Tensor:
        selected = rows if isinstance(rows, Tensor) else torch.tensor(list(rows), dtype=torch.int64)
        limit = self.embedding_specs[table][0]
        if selected.numel() and (int(selected.min()) < 0 or int(selected.max()) >= limit):
            raise IndexError(
                f"table {self.table_labels[table]!r} has rows 0 to {limit - 1}, but rows "
                f"{int(selected.min())} to {int(selected.max())} were given"
            )
        return selected
