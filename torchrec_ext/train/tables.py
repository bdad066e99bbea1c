"""The tables of a sharded model, shard by shard: initial weights and exact zeros."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from torchrec_ext.command.ranks import Ranks

# Rows drawn at once: bounds the memory of initialisation, and must not change, or seeds would
# give other weights.
BLOCK_ROWS = 8192
# What the names of tables start with.
WIDE, DEEP, FACTOR = "wide_", "deep_", "factor_"


@dataclass(frozen=True)
class LocalShard:
    """The part of a table that this rank holds.

    Attributes:
        table: Name of the table, ``wide_<feature>``, ``deep_<feature>`` or ``factor_<feature>``.
        rows: Rows of the whole table.
        dim: Columns of the whole table.
        first_row: The row of the table that is row 0 of ``weight``.
        first_column: The column of the table that is column 0 of ``weight``.
        weight: The trained memory itself, not a copy.
    """

    table: str
    rows: int
    dim: int
    first_row: int
    first_column: int
    weight: torch.Tensor


@dataclass(frozen=True)
class ZeroCount:
    """How many weights of a table are exactly zero, over all ranks.

    Attributes:
        touched_zeros: Zeros among the weights of touched rows.
        touched: Weights of touched rows.
        zeros: Zeros among all weights.
        total: All weights.
    """

    touched_zeros: int
    touched: int
    zeros: int
    total: int

    def __add__(self, other: ZeroCount) -> ZeroCount:
        return ZeroCount(
            self.touched_zeros + other.touched_zeros,
            self.touched + other.touched,
            self.zeros + other.zeros,
            self.total + other.total,
        )

    @property
    def touched_share(self) -> float:
        """Share of zeros among touched weights, 0 when nothing was touched."""
        return self.touched_zeros / self.touched if self.touched else 0.0

    @property
    def share(self) -> float:
        """Share of zeros among all weights."""
        return self.zeros / self.total if self.total else 0.0


def total_of(zeros: Mapping[str, ZeroCount], prefix: str) -> ZeroCount:
    """Add up the tables whose names start with ``prefix``."""
    counts = [count for table, count in zeros.items() if table.startswith(prefix)]
    return sum(counts, start=ZeroCount(0, 0, 0, 0))


def sharded_tables(model: nn.Module) -> list[tuple[str, ShardedTensor]]:
    """List all tables with their names, in the same order on every rank."""
    return [
        (name.split(".")[-2], value)
        for name, value in sorted(model.state_dict().items())
        if isinstance(value, ShardedTensor)
    ]


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """Walk over the table shards that this rank holds."""
    for table, value in sharded_tables(model):
        rows, dim = value.metadata().size
        for shard in value.local_shards():
            first_row, first_column = shard.metadata.shard_offsets
            yield LocalShard(table, rows, dim, first_row, first_column, shard.tensor)


@torch.no_grad()
def initialise_tables(model: nn.Module, seed: int, wide_start: str = "zeros") -> None:
    """Give every table its initial weights, the same under every sharding plan.

    TorchRec draws initial weights shard by shard, so they would depend on the plan. Wide tables
    start at zero, unless told otherwise. The others start uniform in ``+-1 / sqrt(rows)``,
    TorchRec's default range.

    Args:
        model: The model under DistributedModelParallel.
        seed: Seed of the run.
        wide_start: Of wide tables: ``zeros``, or ``uniform`` for what the others get.
    """
    for shard in local_shards(model):
        if shard.table.startswith(WIDE) and wide_start == "zeros":
            shard.weight.zero_()
        else:
            _draw(shard, seed)


def _draw(shard: LocalShard, seed: int) -> None:
    bound = shard.rows**-0.5
    rows, columns = shard.weight.shape
    last_row = shard.first_row + rows
    for block in range(shard.first_row // BLOCK_ROWS, -(-last_row // BLOCK_ROWS)):
        start = block * BLOCK_ROWS
        block_seed = zlib.crc32(f"{seed} {shard.table} {block}".encode())
        generator = torch.Generator().manual_seed(block_seed)
        drawn = torch.empty(min(BLOCK_ROWS, shard.rows - start), shard.dim)
        drawn.uniform_(-bound, bound, generator=generator)
        first, last = max(shard.first_row, start), min(last_row, start + len(drawn))
        shard.weight[first - shard.first_row : last - shard.first_row] = drawn[
            first - start : last - start, shard.first_column : shard.first_column + columns
        ]


class TouchedRows:
    """Remembers which rows of each feature occurred in training.

    Args:
        rows: Table size by feature name.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        self._masks = {name: torch.zeros(count, dtype=torch.bool) for name, count in rows.items()}

    def add(self, feature: str, values: torch.Tensor) -> None:
        """Mark rows, given as int64 indices in any order or as a ``[rows]`` bool mask."""
        self._masks[feature][values] = True

    def on_any_rank(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        """Give ``[rows]`` bool by feature: whether the row occurred on any rank."""
        flags = ranks.any(torch.cat(list(self._masks.values())))
        parts = flags.split([mask.numel() for mask in self._masks.values()])
        return dict(zip(self._masks, parts, strict=True))


def count_zeros_of(weight: torch.Tensor, touched: torch.Tensor) -> ZeroCount:
    """Count the exactly-zero weights of a table or a shard.

    Args:
        weight: ``[rows, columns]``.
        touched: ``[rows]`` bool.
    """
    zero = weight == 0
    touched_weights = int(touched.sum()) * zero.shape[1]
    return ZeroCount(int(zero[touched].sum()), touched_weights, int(zero.sum()), zero.numel())


def count_zeros(
    model: nn.Module, touched: Mapping[str, torch.Tensor], ranks: Ranks
) -> dict[str, ZeroCount]:
    """Count the exactly-zero weights of every table over all ranks.

    Args:
        model: The model under DistributedModelParallel.
        touched: ``[rows]`` bool by feature name.
        ranks: All ranks, each of which must call this.

    Returns:
        Counts by table name.
    """
    counts = {table: ZeroCount(0, 0, 0, 0) for table, _ in sharded_tables(model)}
    for shard in local_shards(model):
        feature = shard.table.partition("_")[2]
        mask = touched[feature][shard.first_row : shard.first_row + shard.weight.shape[0]]
        counts[shard.table] += count_zeros_of(shard.weight, mask)
    sums = iter(ranks.sum(*(float(n) for count in counts.values() for n in astuple(count))))
    return {table: ZeroCount(*(int(next(sums)) for _ in range(4))) for table in counts}
