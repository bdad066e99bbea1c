"""Moves everything that TorchRec's ``reshard`` leaves behind.

TorchRec moves the weights and the first state of a table that changes its place, builds all modules
of the collection anew, and fills them from the old ones. Later states would restart from zero, the
clock from the beginning and the hyperparameters from ``fused_params``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata

from torchrec_ext.distributed.fused_optimizer import FusedOptimizer, ours_in
from torchrec_ext.loaded_weights import LoadHistory

# Where a shard begins: row and column.
Place = tuple[int, ...]


@dataclasses.dataclass
class TableSnapshot:
    """What one table has on this rank, and how it was trained.

    Attributes:
        states: Copies of the states of each local shard, in the order of the spec.
        rowwise: Which of the states have one value per row.
        step: The completed updates.
        hyperparameters: Those in force.
        loads: What was loaded into it.
    """

    states: dict[Place, list[Tensor]]
    rowwise: list[bool]
    step: int
    hyperparameters: dict[str, Any]
    loads: LoadHistory


@dataclasses.dataclass
class Snapshot:
    """All tables of ours of a sharded collection, before it is resharded."""

    tables: dict[str, TableSnapshot]
    shards: dict[str, list[ShardMetadata]]


def take_snapshot(collection: Any) -> Snapshot:
    """Copies the states of this rank's shards.

    Args:
        collection: TorchRec's sharded ``EmbeddingBagCollection``.
    """
    tables: dict[str, TableSnapshot] = {}
    for part in _parts(collection):
        part.module.flush()
        part.module.pull_learning_rate()  # of a scheduler, say, since the last update
        states = part.module.split_optimizer_states()
        for config, of_table in zip(part.tables, states, strict=True):
            entry = tables.setdefault(
                config.name,
                TableSnapshot(
                    {},
                    [state.rowwise for state in part.module._states],
                    int(part.module.iter),
                    dict(part.module.hyperparameters),
                    part.module.loaded_weights.history_of(config.name),
                ),
            )
            place = tuple(config.local_metadata.shard_offsets)
            entry.states[place] = [state.detach().clone() for state in of_table]
    return Snapshot(tables, _all_shards(collection))


def restore(snapshot: Snapshot, collection: Any, process_group: dist.ProcessGroup) -> None:
    """Moves states to where the shards are now; sets clocks and hyperparameters.

    A collective call: every rank makes it, with the same plan.

    Args:
        snapshot: Of the same collection, before.
        collection: The resharded collection.
        process_group: All ranks of the plan.
    """
    now = _all_shards(collection)
    known = _gathered(snapshot, process_group)
    targets = _local_states(collection)
    for table in sorted(known):
        _move_table(
            snapshot.tables.get(table),
            known[table].rowwise,
            (snapshot.shards[table], now[table]),
            targets.get(table, {}),
            process_group,
        )
    for part in _parts(collection):
        entries = {c.name: known[c.name] for c in part.tables if c.name in known}
        entry = _common_entry(entries)
        if entry is not None:
            part.update_hyper_parameters(entry.hyperparameters)
            part.module.set_optimizer_step(entry.step)
            part.module.loaded_weights.go_on({name: each.loads for name, each in entries.items()})


def _common_entry(entries: Mapping[str, TableSnapshot]) -> TableSnapshot | None:
    """How tables that one module has now were trained."""
    trained = [(entry.step, entry.hyperparameters) for entry in entries.values()]
    if any(each != trained[0] for each in trained[1:]):
        raise RuntimeError(
            f"tables {list(entries)} are updated together now, but had different steps or "
            f"hyperparameters before: {trained}; set the same on every rank before reshard()"
        )
    return next(iter(entries.values()), None)


def _parts(collection: Any) -> Iterator[FusedOptimizer]:
    return ours_in(collection._optim)


def _all_shards(collection: Any) -> dict[str, list[ShardMetadata]]:
    return {
        table: list(sharding.sharding_spec.shards)
        for table, sharding in collection.module_sharding_plan.items()
        if sharding.sharding_spec is not None
    }


def _local_states(collection: Any) -> dict[str, dict[Place, list[Tensor]]]:
    found: dict[str, dict[Place, list[Tensor]]] = {}
    for part in _parts(collection):
        for config, states in zip(part.tables, part.module.split_optimizer_states(), strict=True):
            place = tuple(config.local_metadata.shard_offsets)
            found.setdefault(config.name, {})[place] = states
    return found


def _gathered(snapshot: Snapshot, process_group: dist.ProcessGroup) -> dict[str, TableSnapshot]:
    """Every table of ours, on every rank, without its states."""
    bare = {
        table: dataclasses.replace(entry, states={}) for table, entry in snapshot.tables.items()
    }
    everybodys: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everybodys, bare, group=process_group)
    return functools.reduce(lambda left, right: {**left, **right}, everybodys)


def _move_table(
    source: TableSnapshot | None,
    rowwise: Sequence[bool],
    shards: tuple[Sequence[ShardMetadata], Sequence[ShardMetadata]],
    targets: Mapping[Place, Sequence[Tensor]],
    process_group: dist.ProcessGroup,
) -> None:
    """Copies what old and new shards have in common, within this rank and between ranks.

    All ranks go through the same pairs in the same order, so that sends meet their receives.
    """
    rank = dist.get_rank(process_group)
    exchange = _Exchange(process_group)
    for old, new, state in itertools.product(*shards, range(len(rowwise))):
        area = _common(old, new, rowwise[state])
        if area is None:
            continue
        part = target = None
        if rank == _rank_of(old):
            assert source is not None
            part = source.states[tuple(old.shard_offsets)][state][area[0]]
        if rank == _rank_of(new):
            target = targets[tuple(new.shard_offsets)][state][area[1]]
        exchange.add(part, target, _rank_of(old), _rank_of(new))
    exchange.run()


class _Exchange:
    """Copies between ranks that wait to be made together."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._pending: list[dist.P2POp] = []
        self._received: list[tuple[Tensor, Tensor]] = []

    def add(self, part: Tensor | None, target: Tensor | None, sender: int, receiver: int) -> None:
        """Copies at once where both are on this rank; ``None``: on another rank."""
        if part is not None and target is not None:
            target.copy_(part)
        elif part is not None:
            peer = dist.get_global_rank(self._group, receiver)
            self._pending.append(dist.P2POp(dist.isend, part.contiguous(), peer, self._group))
        elif target is not None:
            buffer = torch.empty(target.shape, device=target.device)
            peer = dist.get_global_rank(self._group, sender)
            self._pending.append(dist.P2POp(dist.irecv, buffer, peer, self._group))
            self._received.append((target, buffer))

    def run(self) -> None:
        """Makes the copies."""
        if self._pending:
            for work in dist.batch_isend_irecv(self._pending):
                work.wait()
        for target, buffer in self._received:
            target.copy_(buffer)


def _rank_of(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    assert rank is not None
    return rank


def _common(
    old: ShardMetadata, new: ShardMetadata, rowwise: bool
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two shards overlap, in the one's coordinates and in the other's.

    Of a state with one value per row, a new shard takes what the old shard had that has its first
    column: shards of columns have such states each for itself.
    """
    rows = _overlap(old, new, 0)
    if rows is None:
        return None
    if not rowwise:
        columns = _overlap(old, new, 1)
        return None if columns is None else ((rows[0], columns[0]), (rows[1], columns[1]))
    begin = old.shard_offsets[1]
    has_first = begin <= new.shard_offsets[1] < begin + old.shard_sizes[1]
    return ((rows[0],), (rows[1],)) if has_first else None


def _overlap(old: ShardMetadata, new: ShardMetadata, dim: int) -> tuple[slice, slice] | None:
    starts = old.shard_offsets[dim], new.shard_offsets[dim]
    begin = max(starts)
    end = min(start + each.shard_sizes[dim] for start, each in zip(starts, (old, new), strict=True))
    if begin >= end:
        return None
    first, second = (slice(begin - start, end - start) for start in starts)
    return first, second
