"""The form in which checkpoints hold a table's optimizer: the same for every sharding plan.

- A ``[rows, D]`` state is sharded as the weights are.
- A ``[rows]`` state is one array, sharded by rows, while no shard splits the columns. Shards of
  columns keep such a state each for itself; then it is saved as ``[rows, D / 4]``, the value of a
  shard repeated for every four of its columns (``[rows, D]`` where they are no multiples of 4). A
  plan with other shards takes the mean over its own columns, which is the value of the whole row
  where the state is a mean over columns: exact where all are equal.
- Beside the states stands what they are of: :mod:`torchrec_ext.distributed.description`.

TorchRec's ``EmbeddingFusedOptimizer`` instead stacks the ``[rows]`` states of column shards, which
fits plans of as many shards only, and takes a ``[rows]`` state of one row for a single value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torchrec.distributed.embedding_types import ShardedEmbeddingTable

from torchrec_ext.optimizers import State
from torchrec_ext.tbe import TableBatchedEmbeddingBags

# The first state's name in TorchRec's checkpoints, whatever the optimizer.
FIRST_STATE = "momentum1"
# TorchRec's planner cuts columns at multiples of this.
COLUMNS_PER_VALUE = 4


class SavedTable:
    """A table of this rank, as checkpoints hold its states.

    Attributes:
        name: The table's.
        rows: Of the whole table.
        dim: Of the whole table.
        shards: Of the weights, on all ranks.
        local: This rank's shards of the weights.
        parts: This rank's states, ``[local shard][state]``: views of the module's.
    """

    def __init__(
        self,
        name: str,
        whole: ShardedTensorMetadata,
        local: Sequence[ShardMetadata],
        parts: Sequence[Sequence[Tensor]],
        states: Sequence[State],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        """See the class; ``whole`` describes the weights, ``states`` the columns of ``parts``."""
        self.name = name
        self.rows, self.dim = whole.size
        self.shards = list(whole.shards_metadata)
        self.local = list(local)
        self.parts = [list(each) for each in parts]
        self._states = dict(zip(saved_names(states), states, strict=True))
        self._process_group = process_group
        self._width = columns_per_value(self.shards)
        self._views = {
            saved: self._sharded(saved)
            for saved, state in self._states.items()
            if not self._is_repeated(state)
        }

    @staticmethod
    def of(
        name: str,
        configs: Sequence[ShardedEmbeddingTable],
        states: Sequence[Sequence[Tensor]],
        module: TableBatchedEmbeddingBags,
        process_group: dist.ProcessGroup | None,
    ) -> SavedTable:
        """The table of this name among a module's: ``configs`` and ``states`` in its order."""
        own = [each for each in zip(configs, states, strict=True) if each[0].name == name]
        whole = own[0][0].global_metadata
        assert whole is not None
        local = [config.local_metadata for config, _ in own if config.local_metadata is not None]
        parts = [of_shard for _, of_shard in own]
        return SavedTable(name, whole, local, parts, module._states, process_group)

    @property
    def splits_columns(self) -> bool:
        """Whether a row is spread over several shards."""
        return any(shard.shard_sizes[1] != self.dim for shard in self.shards)

    def states(self) -> dict[str, ShardedTensor]:
        """The states by their keys: of ``[rows]`` states whose rows are split copies, else views.

        Needs no communication.
        """
        return {
            f"{self.name}.{saved}": (
                self._views[saved] if saved in self._views else self._sharded(saved)
            )
            for saved in self._states
        }

    def local_states(self) -> list[dict[str, Tensor]]:
        """The states of each local shard by their names in checkpoints: views, in no other form."""
        return [dict(zip(self._states, parts, strict=True)) for parts in self.parts]

    @property
    def rowwise(self) -> list[str]:
        """The keys of the ``[rows]`` states."""
        return [f"{self.name}.{saved}" for saved, state in self._states.items() if state.rowwise]

    def has_places_of(self, saved: str, value: Any) -> bool:
        """Whether a state's value, from a state dict, has what this rank's shards need."""
        rowwise = self._states[saved].rowwise
        if not isinstance(value, ShardedTensor):
            return rowwise  # then it is whole
        found = [_area(shard.metadata) for shard in value.local_shards()]
        size = value.metadata().size
        expected = [self._saved_place(own, size) if rowwise else own for own in self.local]
        return found == [_area(each) for each in expected]

    def write_rowwise(self, key: str, saved: ShardedTensor | Tensor) -> None:
        """Writes a saved ``[rows]`` state into the module.

        Args:
            key: The state's.
            saved: ``[rows]``, whole or sharded by rows, or ``[rows, values]``.
        """
        place = list(self._states).index(key.removeprefix(f"{self.name}."))
        for shard, parts in zip(self.local, self.parts, strict=True):
            parts[place].copy_(self._value_of(saved, shard))

    def _is_repeated(self, state: State) -> bool:
        return state.rowwise and self.splits_columns

    def _sharded(self, saved: str) -> ShardedTensor:
        state = self._states[saved]
        parts = [of_shard[list(self._states).index(saved)] for of_shard in self.parts]
        if not state.rowwise:
            return self._assemble(self.shards, (self.rows, self.dim), parts)
        if not self.splits_columns:
            return self._assemble([_rows_of(shard) for shard in self.shards], (self.rows,), parts)
        width = self._width
        repeated = [
            part.unsqueeze(1).repeat(1, shard.shard_sizes[1] // width)
            for part, shard in zip(parts, self.local, strict=True)
        ]
        columns = [_scaled(shard, width) for shard in self.shards]
        return self._assemble(columns, (self.rows, self.dim // width), repeated)

    def _assemble(
        self, shards: Sequence[ShardMetadata], size: tuple[int, ...], parts: Sequence[Tensor]
    ) -> ShardedTensor:
        of_weights = dict(zip(self.shards, shards, strict=True))
        local = [Shard(part, of_weights[own]) for part, own in zip(parts, self.local, strict=True)]
        return sharded_tensor(shards, size, local, self._process_group)

    def _value_of(self, saved: ShardedTensor | Tensor, own: ShardMetadata) -> Tensor:
        """What a local shard takes of a saved ``[rows]`` state."""
        if not isinstance(saved, ShardedTensor):
            return self._value_of_whole(saved, own)
        size = saved.metadata().size
        wanted = _area(self._saved_place(own, size))
        found = next(s.tensor for s in saved.local_shards() if _area(s.metadata) == wanted)
        return found if len(size) == 1 else found.mean(dim=1, dtype=torch.float64)

    def _value_of_whole(self, saved: Tensor, own: ShardMetadata) -> Tensor:
        rows, columns = (
            slice(offset, offset + size)
            for offset, size in zip(own.shard_offsets, own.shard_sizes, strict=True)
        )
        if saved.dim() == 1:
            return saved[rows]
        by_column = saved[rows].repeat_interleave(self.dim // saved.shape[1], dim=1)
        return by_column[:, columns].mean(dim=1, dtype=torch.float64)

    def _saved_place(self, own: ShardMetadata, size: Sequence[int]) -> ShardMetadata:
        """Where a shard has its part of a ``[rows]`` state that is saved in this size."""
        return _rows_of(own) if len(size) == 1 else _scaled(own, self.dim // size[1])


def sharded_tensor(
    shards: Sequence[ShardMetadata],
    size: Sequence[int],
    local: Sequence[Shard],
    process_group: dist.ProcessGroup | None,
) -> ShardedTensor:
    """A sharded tensor of what is known already: no communication."""
    properties = TensorProperties(dtype=local[0].tensor.dtype, requires_grad=False)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        list(local),
        ShardedTensorMetadata(list(shards), torch.Size(size), properties),
        process_group=process_group,
    )


def columns_per_value(shards: Sequence[ShardMetadata]) -> int:
    """How many columns share a saved value of a ``[rows]`` state: equal in all the usual plans."""
    widths = {shard.shard_sizes[1] for shard in shards}
    return COLUMNS_PER_VALUE if all(width % COLUMNS_PER_VALUE == 0 for width in widths) else 1


def _rows_of(shard: ShardMetadata) -> ShardMetadata:
    return ShardMetadata(shard.shard_offsets[:1], shard.shard_sizes[:1], shard.placement)


def _scaled(shard: ShardMetadata, width: int) -> ShardMetadata:
    offsets, sizes = shard.shard_offsets, shard.shard_sizes
    return ShardMetadata(
        [offsets[0], offsets[1] // width], [sizes[0], sizes[1] // width], shard.placement
    )


def _area(shard: ShardMetadata) -> tuple[list[int], list[int]]:
    return list(shard.shard_offsets), list(shard.shard_sizes)


def room_for(value: ShardedTensor, size: Sequence[int]) -> ShardedTensor | Tensor:
    """Room for a ``[rows]`` state that was saved in the other size.

    Args:
        value: The state in the size that this plan would save.
        size: The size in the checkpoint.

    Returns:
        The whole, where this plan's shards need overlapping parts; else sharded by rows.
    """
    local = value.local_shards()
    if len(value.metadata().size) == 2:
        return torch.zeros(size, dtype=local[0].tensor.dtype, device=local[0].tensor.device)
    parts = [
        Shard(shard.tensor.unsqueeze(1).repeat(1, size[1]), _with_columns(shard.metadata, size[1]))
        for shard in local
    ]
    shards = [_with_columns(shard, size[1]) for shard in value.metadata().shards_metadata]
    return sharded_tensor(shards, size, parts, value._process_group)


def _with_columns(shard: ShardMetadata, columns: int) -> ShardMetadata:
    return ShardMetadata([*shard.shard_offsets, 0], [*shard.shard_sizes, columns], shard.placement)


def saved_names(states: Sequence[State]) -> list[str]:
    """The names of an optimizer's states in checkpoints."""
    return [state.name if place else FIRST_STATE for place, state in enumerate(states)]
