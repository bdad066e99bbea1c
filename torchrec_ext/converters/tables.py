"""Writes converted weights and states into a table, sharded or not, and reads them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata

from torchrec_ext.converters.states import FTRL, STATE_NAMES, States, with_weights
from torchrec_ext.distributed.fused_optimizer import ours_in
from torchrec_ext.optim_type import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags
from torchrec_ext.weights_of_states import write_weights_of_states

# Rows compared at once, and by how much of a weight float16 and the order of sums may be off.
_COMPARED_ROWS = 2**16
_ROUNDING = 0.01


@dataclasses.dataclass
class _Shard:
    """A shard of the table on this rank: where it begins, and views of what it has."""

    module: TableBatchedEmbeddingBags
    number: int  # of the table in the module
    place: tuple[int, ...]
    weights: Tensor
    states: dict[str, Tensor]

    @property
    def region(self) -> tuple[slice, ...]:
        """The shard in the whole table's coordinates."""
        pairs = zip(self.place, self.weights.shape, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in pairs)


@torch.no_grad()
def load_table(
    model: nn.Module,
    table: str | int,
    weights: Any,
    states: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
) -> None:
    """Writes a table's weights and FTRL states; training then goes on from them.

    Needs no communication: every rank calls it with the whole table and writes its own shards.

    Args:
        model: A :class:`~torchrec_ext.tbe.TableBatchedEmbeddingBags`, or a sharded embedding
            collection or a model with one that has the table, such as a
            ``DistributedModelParallel``.
        table: Its name; its number where a bare module's tables have none.
        weights: float ``[rows, D]`` of the whole table; rounded to the table's dtype.
        states: "linear" and "accum", float ``[rows, D]`` each.
        hyperparameters: Those that the states belong to. The table must have been built with the
            same; of those left out only ``multiply_linear_by_lr`` is compared, as False.

    Raises:
        KeyError: No table has this name.
        TypeError: An array is no numpy array or tensor of floats.
        ValueError: Shapes are not the table's, the table is not trained by ``OptimType.FTRL`` of
            this package, its hyperparameters are others, or its dtype cannot hold a weight. Nothing
            was changed on this rank; the last three are noticed by ranks that have shards of the
            table.

    Warns:
        UserWarning: The states stand for other weights, which an update of their rows returns to:
            since the last updates the learning rate has changed, or something is wrong.
    """
    own_weights, own_states = with_weights(weights, states)
    shards, size = _shards_of(model, table)
    if own_weights.shape != size:
        raise ValueError(
            f"table {table!r}: weights and states have the shape {list(own_weights.shape)}, but "
            f"the table has {list(size)}; give the whole table"
        )
    for shard in shards:
        _check_hyperparameters(table, shard.module, hyperparameters)
        _check_range(table, shard.weights.dtype, own_weights)
    for shard in shards:
        shard.weights.copy_(own_weights[shard.region])
        for name, state in shard.states.items():
            state.copy_(own_states[name][shard.region])
        shard.module.loaded_weights.loaded_with_states([shard.module.table_labels[shard.number]])
        if shard.module.lxu_cache_weights.numel() > 0:
            shard.module.reset_cache_states()  # the cache has the rows as they were
        _warn_of_other_weights(table, shard)


@torch.no_grad()
def read_table(model: nn.Module, table: str | int) -> tuple[Tensor, States]:
    """A table's weights and FTRL states.

    Of a sharded table a collective call: every rank makes it and gets the whole.

    Args:
        model: As for :func:`load_table`.
        table: As for :func:`load_table`.

    Returns:
        The weights, float32 ``[rows, D]`` on the CPU, and "linear" and "accum", likewise.

    Raises:
        KeyError: No table has this name.
        ValueError: The table is not trained by ``OptimType.FTRL`` of this package.
    """
    shards, size = _shards_of(model, table)
    whole = {name: torch.zeros(size) for name in ("weights", *STATE_NAMES)}
    for shard in shards:
        for name, part in {"weights": shard.weights, **shard.states}.items():
            whole[name][shard.region] = part.float().cpu()
    if not isinstance(model, TableBatchedEmbeddingBags):
        collection = _collection_of(model, table)
        for metadata in _plan_of(collection, table):
            for full in whole.values():
                _share(full, metadata, collection)
    weights = whole.pop("weights")
    return weights, whole


def _share(full: Tensor, metadata: ShardMetadata, collection: Any) -> None:
    """Sends a shard's part of ``full`` from the rank that has it to all others."""
    bounds = zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
    region = tuple(slice(begin, begin + size) for begin, size in bounds)
    if full[region].numel() == 0:
        return
    group = collection._env.process_group
    part = full[region].to(collection._device).contiguous()
    dist.broadcast(part, dist.get_global_rank(group, _rank_of(metadata)), group)
    full[region] = part.cpu()


def _shards_of(model: nn.Module, table: str | int) -> tuple[list[_Shard], torch.Size]:
    """This rank's shards, and the whole table's size."""
    if isinstance(model, TableBatchedEmbeddingBags):
        number = model._table_number(table)
        [shard] = _views(model, table, {number: (0, 0)})
        return [shard], shard.weights.shape
    collection = _collection_of(model, table)
    plan = _plan_of(collection, table)
    shards: list[_Shard] = []
    for part in ours_in(collection._optim):
        places = {
            number: tuple(config.local_metadata.shard_offsets)
            for number, config in enumerate(part.tables)
            if config.name == table and config.local_metadata is not None
        }
        shards += _views(part.module, table, places)
    rank = dist.get_rank(collection._env.process_group)
    expected = [shard for shard in plan if _rank_of(shard) == rank]
    if len(shards) != len(expected):
        raise ValueError(
            f"table {table!r} is not trained by an optimizer of torchrec_ext; build the model with "
            "fused_params={'optimizer': OptimType.FTRL, ...}"
        )
    ends = [[sum(pair) for pair in zip(s.shard_offsets, s.shard_sizes, strict=True)] for s in plan]
    return shards, torch.Size(max(column) for column in zip(*ends, strict=True))


def _views(
    module: TableBatchedEmbeddingBags, table: str | int, places: Mapping[int, tuple[int, ...]]
) -> Iterator[_Shard]:
    """A module's shards of the table, by their numbers in it."""
    if not places:
        return
    if module.optim_type != OptimType.FTRL:
        raise ValueError(
            f"table {table!r} is trained by OptimType.{module.optim_type.name}, which has no "
            "linear and accum; build it with OptimType.FTRL"
        )
    module.flush()
    weights, states = module.split_embedding_weights(), module.get_optimizer_state()
    for number, place in places.items():
        yield _Shard(module, number, place, weights[number], states[number])


def _collection_of(model: nn.Module, table: str | int) -> Any:
    """The sharded collection in ``model`` that has the table."""
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "module_sharding_plan") and hasattr(module, "_optim")
    }
    having = {name: m for name, m in found.items() if table in m.module_sharding_plan}
    if not having:
        known = sorted(each for m in found.values() for each in m.module_sharding_plan)
        raise KeyError(f"there is no sharded table {table!r}; the tables are {known}")
    if len(having) > 1:
        raise KeyError(
            f"there are tables {table!r} in {sorted(having)}; give the collection that is meant "
            "as model"
        )
    [collection] = having.values()
    return collection


def _plan_of(collection: Any, table: str | int) -> list[ShardMetadata]:
    """Every rank's shards of the table."""
    spec = collection.module_sharding_plan[table].sharding_spec
    if spec is None:
        raise ValueError(
            f"table {table!r} is data_parallel: a plain parameter, not trained by a fused "
            "optimizer; copy the weights into it, and the states into state[parameter] of its "
            "torchrec_ext.optim.FTRL"
        )
    return list(spec.shards)


def _rank_of(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    assert rank is not None
    return rank


def _check_hyperparameters(
    table: str | int, module: TableBatchedEmbeddingBags, given: Mapping[str, Any]
) -> None:
    wanted = FTRL.resolve(given)
    module.pull_learning_rate()  # of a scheduler, say, since the last update
    compared = {FTRL.keywords[name].name for name in given} | {"multiply_linear_by_lr"}
    for name in sorted(compared):
        if module.hyperparameters[name] != wanted[name]:
            raise ValueError(
                f"table {table!r} has {name}={module.hyperparameters[name]!r}, but the states "
                f"belong to {name}={wanted[name]!r}; build the model with fused_params that hold "
                "the converted hyperparameters, or leave it out here if another value is meant"
            )


def _check_range(table: str | int, dtype: torch.dtype, weights: Tensor) -> None:
    if not bool(weights.to(dtype).isfinite().all()):
        raise ValueError(
            f"table {table!r} is {dtype}, which cannot hold weights up to "
            f"{float(weights.abs().max()):g}; build the model with float32 tables"
        )


def _warn_of_other_weights(table: str | int, shard: _Shard) -> None:
    """Rows without an update yet do not count: their states stand for no weight."""
    others, worst = 0, (0.0, 0, 0.0, 0.0)
    for first in range(0, len(shard.weights), _COMPARED_ROWS):
        rows = slice(first, first + _COMPARED_ROWS)
        own, states = shard.weights[rows], [state[rows].clone() for state in shard.states.values()]
        derived = own.clone()
        numbers = torch.arange(len(own), device=own.device)
        write_weights_of_states(shard.module, derived, states, numbers)
        expected = derived.float()
        differences = (own.float() - expected).abs()
        allowed = _ROUNDING * torch.maximum(own.float().abs(), expected.abs())
        differs = (differences > allowed) & (shard.states["linear"][rows] != 0)
        others += int(differs.any(1).sum())
        differences = torch.where(differs, differences, 0.0)
        if differs.any() and float(differences.max()) > worst[0]:
            row, column = divmod(int(differences.argmax()), own.shape[1])
            found = float(own[row, column]), float(expected[row, column])
            worst = (float(differences.max()), shard.place[0] + first + row, *found)
    if others:
        warnings.warn(
            f"table {table!r}: the states stand for other weights in {others} rows, which their "
            f"next updates return to; row {worst[1]} has {worst[2]:g}, its states give "
            f"{worst[3]:g}. If the learning rate has not changed since, check the order of rows "
            "and the factors of hyperparameters",
            stacklevel=4,
        )
