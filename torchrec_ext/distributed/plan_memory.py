"""What a sharding plan takes in memory, in bytes: TorchRec's own report has whole GB."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import (
    Enumerator,
    Shard,
    SharderData,
    ShardingOption,
    Storage,
)

from torchrec_ext.distributed import estimates
from torchrec_ext.optimizers import State
from torchrec_ext.text_table import format_table

CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
UNCACHED = EmbeddingComputeKernel.FUSED_UVM.value


@dataclass(frozen=True)
class ShardMemory:
    """The memory of one shard of a table, in bytes as the planner counts them.

    ``weights``, ``states``, ``cache`` and ``input_output`` add up to ``hbm``, ``ddr`` and ``ssd``.

    Example:
        >>> shard = ShardMemory(
        ...     table="item", sharding_type="row_wise", compute_kernel="fused", rank=0, rows=500,
        ...     dim=8, weights=8000, states={"sum": 2000}, cache=0, input_output=4096,
        ...     hbm=0, ddr=14096)
        >>> shard.total
        14096

    Attributes:
        table: The table's name.
        sharding_type: How the table is sharded.
        compute_kernel: Its compute kernel.
        rank: The rank that holds the shard.
        rows: Rows of the shard.
        dim: Columns of the shard.
        weights: The weights.
        states: Every optimizer state by name; for a table with an optimizer of FBGEMM, what
            TorchRec counts for it, as ``optimizer``.
        cache: FBGEMM's cache of a table in managed memory.
        input_output: The batch's indices and embeddings, and whatever else TorchRec counts.
        hbm: What of all this is on the device.
        ddr: What is in the host's memory.
        ssd: What is on a disk, which only tables of FBGEMM's can be.
    """

    table: str
    sharding_type: str
    compute_kernel: str
    rank: int
    rows: int
    dim: int
    weights: int
    states: Mapping[str, int]
    cache: int
    input_output: int
    hbm: int
    ddr: int
    ssd: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.hbm + self.ddr + self.ssd

    @property
    def bytes_by_column(self) -> dict[str, int]:
        """The figures under the headings of :func:`plan_table`."""
        return {
            "weights": self.weights,
            **self.states,
            "cache": self.cache,
            "input/output": self.input_output,
            "hbm": self.hbm,
            "ddr": self.ddr,
            "ssd": self.ssd,
        }


def plan_memory(
    options: Sequence[ShardingOption],
    enumerator: Enumerator,
    sharder_data_map: Mapping[str, SharderData],
    compute_device: str,
) -> tuple[ShardMemory, ...]:
    """Takes the estimates of a plan apart.

    Args:
        options: The plan: one option per table, its shards with rank and storage.
        enumerator: The enumerator that made and estimated the options.
        sharder_data_map: What TorchRec read from the sharders, by the type of module.
        compute_device: The topology's.

    Returns:
        Every shard, in the plan's order.
    """
    # TorchRec gives sums only. The parts are what is left of them without the optimizer, and
    # without the cache.
    bare = [copy.deepcopy(option) for option in options]
    uncached = [copy.deepcopy(option) for option in options]
    for option in uncached:
        if option.compute_kernel == CACHING:
            option.compute_kernel = UNCACHED
    with estimates.without_optimizer(option.tensor for option in options):
        enumerator.populate_estimates([*bare, *uncached])
    states_of = estimates.states_by_option(options, sharder_data_map)
    parts = zip(options, bare, uncached, states_of, strict=True)
    return tuple(
        _shard_memory(option, shards, states, compute_device)
        for option, *others, states in parts
        for shards in zip(option.shards, *(other.shards for other in others), strict=True)
    )


def _shard_memory(
    option: ShardingOption,
    shards: tuple[Shard, Shard, Shard],
    states: tuple[State, ...] | None,
    compute_device: str,
) -> ShardMemory:
    shard, bare, uncached = shards
    rows, dim = shard.size
    # TorchRec counts no weights of a virtual table, only its cache.
    weights = min(rows * dim * option.tensor.element_size(), _total(uncached.storage))
    if states is None:
        optimizer = _total(shard.storage) - _total(bare.storage)
        sizes = {"optimizer": optimizer} if optimizer else {}
    else:
        sizes = {state.name: state.bytes_of(rows, dim) for state in states}
    return ShardMemory(
        table=option.name,
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        rank=shard.rank,
        rows=rows,
        dim=dim,
        weights=weights,
        states=sizes,
        cache=_total(bare.storage) - _total(uncached.storage),
        input_output=_total(uncached.storage) - weights,
        hbm=shard.storage.hbm,
        ddr=shard.storage.ddr,
        ssd=shard.storage.ssd,
    )


def _total(storage: Storage) -> int:
    return storage.hbm + storage.ddr + storage.ssd


def rank_totals(memory: Sequence[ShardMemory]) -> dict[int, dict[str, int]]:
    """The bytes of each rank that holds anything, by rank and column, smallest rank first."""
    totals: dict[int, dict[str, int]] = {}
    for shard in sorted(memory, key=lambda shard: shard.rank):
        total = totals.setdefault(shard.rank, {})
        for column, size in shard.bytes_by_column.items():
            total[column] = total.get(column, 0) + size
    return totals


def plan_table(memory: Sequence[ShardMemory]) -> str:
    """Lays a plan's memory out for people.

    Args:
        memory: The shards, from :func:`plan_memory` or a planner's ``memory``.

    Returns:
        One line for each shard and one for each rank, in bytes; columns of zeros are left out.
    """
    totals = rank_totals(memory)
    columns = _columns(memory)
    header = ["table", "rank", "rows", "dim", "sharding", "kernel", *columns]
    rows = [header]
    for shard in memory:
        place = [str(shard.rank), f"{shard.rows:,}", str(shard.dim)]
        kinds = [shard.sharding_type, shard.compute_kernel]
        rows.append([shard.table, *place, *kinds, *_cells(shard.bytes_by_column, columns)])
    for rank, total in totals.items():
        rows.append(["all tables", str(rank), "", "", "", "", *_cells(total, columns)])
    return format_table(rows)


def _columns(memory: Sequence[ShardMemory]) -> list[str]:
    """The headings that any shard has bytes under: the states between weights and the rest."""
    states = {name: None for shard in memory for name in shard.states}
    used = {
        column for shard in memory for column, size in shard.bytes_by_column.items() if size > 0
    }
    every = ["weights", *states, "cache", "input/output", "hbm", "ddr", "ssd"]
    return [column for column in every if column in used]


def _cells(sizes: Mapping[str, int], columns: Sequence[str]) -> list[str]:
    return [f"{sizes[column]:,}" if column in sizes else "" for column in columns]
