"""Checks that a sharding plan keeps a table's fused optimizer.

TorchRec trains a DENSE or DATA_PARALLEL table with whatever optimizer holds its dense parameter,
and its key-value, virtual-table, Triton and quantised kernels know only FBGEMM's optimizers. A
plan that says one of these for a table with one of ours would drop the optimizer, so it is refused
on every rank, before a kernel is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_ext import optim
from torchrec_ext.any_width import FBGEMM_WIDTH
from torchrec_ext.distributed.table_optimizers import named
from torchrec_ext.optim_type import OptimType

# The compute kernels that honour our optimizers; on the CPU all of them are the first.
KERNELS = (
    EmbeddingComputeKernel.FUSED.value,
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)
# Every sharding type that splits a table into shards with one owner each.
SHARDING_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
)
# Under these, TorchRec takes the mean of mean pooling after all ranks have summed.
MEAN_AFTERWARDS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
# These place a table, or each of its column slices, on all ranks of one host.
HOST_SHARDING_TYPES = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


class PlanError(ValueError):
    """A sharding plan under which a table would not be trained by its fused optimizer."""


def kernel_problem(table: str, optimizer: OptimType, compute_kernel: str) -> str | None:
    """Says what is wrong with a table's compute kernel, and the constraint that puts it right."""
    if compute_kernel in KERNELS:
        return None
    return (
        f"table {table!r}: compute kernel {compute_kernel!r} does not run "
        f"OptimType.{optimizer.name}, it would drop or replace the fused optimizer; set "
        f"ParameterConstraints(compute_kernels={list(KERNELS[:1])}) for it, or "
        f"compute_kernel='fused' in a plan written by hand{_dense_way_out(optimizer)}"
    )


def sharding_type_problem(table: str, optimizer: OptimType, sharding_type: str) -> str | None:
    """Says what is wrong with a table's sharding type, and the constraint that puts it right."""
    if sharding_type in SHARDING_TYPES:
        return None
    return (
        f"table {table!r}: sharding type {sharding_type!r} does not run "
        f"OptimType.{optimizer.name}, every rank would train a copy of the table without it; plan "
        "with the sharders of torchrec_ext.distributed, or set "
        f"ParameterConstraints(sharding_types={list(SHARDING_TYPES[:4])}, "
        f"compute_kernels={list(KERNELS[:1])}) for it{_dense_way_out(optimizer)}"
    )


def _dense_way_out(optimizer: OptimType) -> str:
    name = optim.classes()[optimizer].__name__
    return (
        f". To train it as a dense parameter with the same update, take OptimType.{optimizer.name} "
        f"out of its fused_params and give the parameter to torchrec_ext.optim.{name}"
    )


def check_sharding(infos: Iterable[EmbeddingShardingInfo]) -> None:
    """Checks the placement of every table that carries one of our optimizers.

    Args:
        infos: TorchRec's description of the tables to shard, ``fused_params`` merged.

    Raises:
        PlanError: Names each table whose plan would not train it right, and what to set.
    """
    infos = list(infos)
    optimizers = [(info.fused_params or {}).get("optimizer") for info in infos]
    problems: list[str] = []
    if any(isinstance(optimizer, OptimType) for optimizer in optimizers):
        problems += mean_problems(
            [(info.embedding_config, info.param_sharding.sharding_type) for info in infos]
        )
    for info, optimizer in zip(infos, optimizers, strict=True):
        if isinstance(optimizer, OptimType):
            problem = _table_problem(info, optimizer)
            if problem is not None:
                problems.append(problem)
    if problems:
        raise PlanError("\n".join(problems))


def check_sequence_widths(infos: Iterable[EmbeddingShardingInfo]) -> None:
    """Checks that the column shards of an ``EmbeddingCollection``'s tables have one width.

    TorchRec reads the lookups of all of them by the width of the first.

    Args:
        infos: As for :func:`check_sharding`.

    Raises:
        PlanError: Names two tables, or one, with shards of different widths, and what to set.
    """
    first: tuple[str, int] | None = None
    for info in infos:
        sharding = info.param_sharding
        ours = isinstance((info.fused_params or {}).get("optimizer"), OptimType)
        if not ours or sharding.sharding_type != ShardingType.COLUMN_WISE.value:
            continue
        for shard in sharding.sharding_spec.shards:
            table, width = info.embedding_config.name, shard.shard_sizes[1]
            first = first or (table, width)
            if width != first[1]:
                raise PlanError(
                    f"table {table!r}: a column shard of {width} columns beside one of {first[1]} "
                    f"of table {first[0]!r}; in an EmbeddingCollection TorchRec takes one width. "
                    "Set the same ParameterConstraints(min_partition=...) for all its tables, or "
                    "equal sizes in a plan written by hand"
                )


def _table_problem(info: EmbeddingShardingInfo, optimizer: OptimType) -> str | None:
    table = info.embedding_config.name
    sharding = info.param_sharding
    return (
        sharding_type_problem(table, optimizer, sharding.sharding_type)
        or kernel_problem(table, optimizer, sharding.compute_kernel)
        or _width_problem(table, sharding)
        or _grid_problem(info)
        or _host_problem(table, sharding)
    )


def _width_problem(table: str, sharding: ParameterSharding) -> str | None:
    """Any width is right on the CPU and in a device's memory, not in that which it shares."""
    if sharding.compute_kernel == KERNELS[0]:
        return None
    for shard in sharding.sharding_spec.shards:
        width, place = shard.shard_sizes[1], shard.placement
        on_device = place is not None and place.device().type != "cpu"
        if on_device and width % FBGEMM_WIDTH != 0:
            return (
                f"table {table!r}: a shard of {width} columns with compute kernel "
                f"{sharding.compute_kernel!r}; on CUDA widths that are no multiple of "
                f"{FBGEMM_WIDTH} need {KERNELS[0]!r}: set ParameterConstraints(compute_kernels="
                f"{list(KERNELS[:1])}) for it, or choose an embedding_dim that is a multiple and, "
                "for column shards, ParameterConstraints(min_partition=...) that is one too"
            )
    return None


def _grid_problem(info: EmbeddingShardingInfo) -> str | None:
    """What TorchRec accepts and gets wrong under grid_shard."""
    table = info.embedding_config
    if info.param_sharding.sharding_type != ShardingType.GRID_SHARD.value:
        return None
    if table.pooling == PoolingType.MEAN:
        return (
            f"table {table.name!r}: mean pooling under grid_shard; TorchRec divides each rank's "
            "part of a bag by that part's length. Set ParameterConstraints(sharding_types=["
            "'table_row_wise']) or another type for it"
        )
    return None


def mean_problems(tables: Sequence[tuple[EmbeddingBagConfig, str]]) -> Iterator[str]:
    """What a mean-pooled table under row_wise does to the other tables of its collection.

    TorchRec sums there and divides by the bags' lengths afterwards, over the whole collection. It
    leaves out sum-pooled tables that are sharded by rows themselves, and of a feature that several
    tables read the first one alone.

    Args:
        tables: All of a collection, with their sharding types.

    Yields: a line for each table that would be trained wrong.
    """
    by_rows = [table for table, sharding_type in tables if sharding_type in MEAN_AFTERWARDS]
    means = [table.name for table in by_rows if table.pooling == PoolingType.MEAN]
    if not means:
        return
    readers = Counter(feature for table in by_rows for feature in set(table.feature_names))
    for table, sharding_type in tables:
        shared = [feature for feature in table.feature_names if readers[feature] > 1]
        if sharding_type not in MEAN_AFTERWARDS:
            what = f"{sharding_type} beside"
        elif shared and table.pooling != PoolingType.MEAN:
            what = f"feature {shared[0]!r} is read by another table as well, beside"
        else:
            continue
        yield (
            f"table {table.name!r}: {what} the mean-pooled {named(means)} under row_wise or "
            f"table_row_wise; TorchRec divides its bags by their lengths too. Give {named(means)} "
            "sharding_types=['table_wise'] or 'column_wise' in ParameterConstraints, or an "
            "EmbeddingBagCollection of its own"
        )


def _host_problem(table: str, sharding: ParameterSharding) -> str | None:
    """Two-level sharding trains the wrong rows when plan and process group count hosts apart."""
    if sharding.sharding_type not in HOST_SHARDING_TYPES:
        return None
    local_size = get_local_size()
    ranks_by_column: dict[int, list[int]] = {}
    for shard, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True):
        ranks_by_column.setdefault(shard.shard_offsets[1], []).append(rank)
    for ranks in ranks_by_column.values():
        first = ranks[0] - ranks[0] % local_size
        if ranks != list(range(first, first + local_size)):
            return (
                f"table {table!r}: {sharding.sharding_type} puts its rows on ranks {ranks}, but a "
                f"host has {local_size} ranks (LOCAL_WORLD_SIZE), here {first} to "
                f"{first + local_size - 1}; make Topology(local_world_size=...) and "
                "LOCAL_WORLD_SIZE agree"
            )
    return None
