"""How many weights and rows of embedding tables are exactly zero, and what the others take.

A weight is zero if it equals 0.0, of either sign; NaN is not zero. A row is zero if all of its
weights are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from torchrec_ext.text_table import format_table

# The names of TorchRec's collections for their tables, as they end a parameter's name.
_TABLE_KEY = re.compile(
    r"^(?P<collection>.*?)(embedding_bags|embeddings)\.(?P<name>[^.]+)\.weight$"
)
# Weights compared at once: bounds the memory of the comparison.
_BLOCK_WEIGHTS = 2**20
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class TableSparsity:
    """What of a table is not zero, over all ranks.

    Attributes:
        table: Its name; with the names of the modules that hold it where two tables share one.
        rows: Rows.
        dim: Columns.
        dtype: Of the weights.
        nonzero_rows: Rows with a weight that is not zero.
        nonzero_weights: Weights that are not zero.
    """

    table: str
    rows: int
    dim: int
    dtype: torch.dtype
    nonzero_rows: int
    nonzero_weights: int

    @property
    def weights(self) -> int:
        """All weights."""
        return self.rows * self.dim

    @property
    def zero_row_share(self) -> float:
        """Share of zero rows, 0 to 1; 0 for a table without rows."""
        return _zero_share(self.nonzero_rows, self.rows)

    @property
    def zero_weight_share(self) -> float:
        """Share of zero weights, 0 to 1; 0 for a table without rows."""
        return _zero_share(self.nonzero_weights, self.weights)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all rows."""
        return self.weights * self.dtype.itemsize

    @property
    def sparse_bytes(self) -> int:
        """Bytes of the rows that are not zero, each with its row id (see ``row_id_dtype``)."""
        row_bytes = row_id_dtype(self.rows).itemsize + self.dim * self.dtype.itemsize
        return self.nonzero_rows * row_bytes


Source = nn.Module | Tensor | Mapping[str, Tensor]


@torch.no_grad()
def measure(source: Source) -> list[TableSparsity]:
    """Count what is not zero, table by table.

    A sharded model makes this a collective: every rank of its process group calls it, and every
    rank gets the figures of whole tables. Under ``sparse_mode="dense"`` tables are brought up to
    date first, as for a checkpoint.

    Args:
        source: A module that holds tables anywhere in it: TorchRec's collections, sharded
            (DistributedModelParallel) or not, and table-batched modules of this package and of
            FBGEMM. Or one table ``[rows, dim]``, or several by name.

    Raises:
        TypeError: ``source``, or what holds a table in it, is something else.
        ValueError: There is no table in the module, or a tensor has not two dimensions.
    """
    return [_measure_table(name, table) for name, table in _named_tables(source)]


def format_sparsity(tables: Sequence[TableSparsity]) -> str:
    """Lay out the figures for people, with a line for all tables.

    Args:
        tables: Any number, in the order of the lines.
    """
    header = ["table", "rows", "dim", "dtype", "nonzero rows", "zero rows", "nonzero weights"]
    lines = [[*header, "zero weights", "dense bytes", "sparse bytes"]]
    for each in tables:
        dtype = str(each.dtype).removeprefix("torch.")
        lines.append(
            [
                *(each.table, str(each.rows), str(each.dim), dtype),
                *(str(each.nonzero_rows), f"{each.zero_row_share:.1%}"),
                *(str(each.nonzero_weights), f"{each.zero_weight_share:.1%}"),
                *(str(each.dense_bytes), str(each.sparse_bytes)),
            ]
        )
    rows, weights = sum(each.rows for each in tables), sum(each.weights for each in tables)
    kept_rows = sum(each.nonzero_rows for each in tables)
    kept_weights = sum(each.nonzero_weights for each in tables)
    lines.append(
        [
            *("all tables", str(rows), "", ""),
            *(str(kept_rows), f"{_zero_share(kept_rows, rows):.1%}"),
            *(str(kept_weights), f"{_zero_share(kept_weights, weights):.1%}"),
            str(sum(each.dense_bytes for each in tables)),
            str(sum(each.sparse_bytes for each in tables)),
        ]
    )
    return format_table(lines)


def nonzero_rows(weight: Tensor) -> Tensor:
    """Say which rows of a table ``[rows, dim]`` are not zero, as bool ``[rows]``."""
    blocks = [(block != 0).any(dim=1) for block in _blocks(weight)]
    return torch.cat(blocks) if blocks else torch.zeros(0, dtype=torch.bool, device=weight.device)


def row_id_dtype(rows: int) -> torch.dtype:
    """Give the dtype that row ids of a table are saved in: int32 if all of them fit, or int64."""
    return torch.int32 if rows <= _INT32_MAX else torch.int64


def _zero_share(kept: int, total: int) -> float:
    return 1 - kept / total if total else 0.0


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    size = max(1, _BLOCK_WEIGHTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], size):
        yield weight[start : start + size]


def _count_weights(weight: Tensor) -> int:
    return sum(int(torch.count_nonzero(block)) for block in _blocks(weight))


def _measure_table(name: str, table: Tensor | ShardedTensor) -> TableSparsity:
    if isinstance(table, ShardedTensor):
        return _measure_shards(name, table)
    if not isinstance(table, Tensor) or isinstance(table, DTensor):
        raise TypeError(
            f"table {name!r} is a {type(table).__name__}; expected a plain or a sharded tensor"
        )
    if table.dim() != 2:
        raise ValueError(f"table {name!r} has the shape {tuple(table.shape)}; expected [rows, dim]")
    if table.device.type == "meta":
        raise ValueError(f"table {name!r} is on the meta device and has no weights; shard it first")
    rows, dim = table.shape
    kept = int(nonzero_rows(table).sum())
    return TableSparsity(name, rows, dim, table.dtype, kept, _count_weights(table))


def _measure_shards(name: str, table: ShardedTensor) -> TableSparsity:
    rows, dim = table.metadata().size
    shards = table.metadata().shards_metadata
    device = torch.device(dist.get_backend_config(table._process_group).split(":")[0])
    # A row in several column shards is counted once: only there ranks need to know which rows.
    in_columns = any(shard.shard_sizes[1] not in (0, dim) for shard in shards)
    kept = torch.zeros(rows if in_columns else 1, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for shard in table.local_shards():
        own = nonzero_rows(shard.tensor)
        if in_columns:
            first = shard.metadata.shard_offsets[0]
            kept[first : first + len(own)] |= own
        counts += torch.stack([own.sum(), torch.tensor(_count_weights(shard.tensor))]).to(device)
    dist.all_reduce(counts, group=table._process_group)
    if in_columns:
        dist.all_reduce(kept, op=dist.ReduceOp.MAX, group=table._process_group)
        counts[0] = kept.sum()
    return TableSparsity(name, rows, dim, table.dtype, int(counts[0]), int(counts[1]))


def _named_tables(source: Source) -> list[tuple[str, Tensor | ShardedTensor]]:
    if isinstance(source, Tensor):
        return [("table", source)]
    if isinstance(source, Mapping):
        return list(source.items())
    if not isinstance(source, nn.Module):
        raise TypeError(f"cannot measure a {type(source).__name__}; expected a module or tensors")
    found = [*_collection_tables(source), *_batched_tables(source)]
    if not found:
        raise ValueError(f"{type(source).__name__} holds no embedding table")
    uses = Counter(name for _, name, _ in found)
    return [(name if uses[name] == 1 else path + name, table) for path, name, table in found]


def _collection_tables(module: nn.Module) -> Iterator[tuple[str, str, Tensor | ShardedTensor]]:
    for key, value in module.state_dict().items():
        match = _TABLE_KEY.match(key)
        if match is not None:
            yield match["collection"], match["name"], value


def _batched_tables(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for path, part in module.named_modules():
        if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen):
            part.flush()
            weights = part.split_embedding_weights()
            names = part.table_names or [str(number) for number in range(len(weights))]
            for name, weight in zip(names, weights, strict=True):
                yield f"{path}." if path else "", name, weight
