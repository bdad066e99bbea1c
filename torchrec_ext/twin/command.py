"""``torchrec-ext parity``: a twin from a configuration file, and the table of its differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from tqdm import tqdm

from torchrec_ext.command.errors import UserError
from torchrec_ext.command.ranks import Ranks
from torchrec_ext.command.run import config_parser, run
from torchrec_ext.command.sections import (
    Count,
    Dim,
    OptimizerConfig,
    Section,
    Seed,
    ShardingTypeName,
    key_error,
)
from torchrec_ext.twin.bare import BareTwin
from torchrec_ext.twin.compare import Difference, largest, table_of
from torchrec_ext.twin.description import Description, Pooling, Precision, Table
from torchrec_ext.twin.sharded import ShardedTwin

EXIT_DIFFERENT = 1
_INDEX_DTYPE = {"int32": torch.int32, "int64": torch.int64}


class TableConfig(Section):
    """One table; ``features`` defaults to the table's name."""

    name: str = Field(pattern=r"^[^.]+$")  # TorchRec makes a submodule's name of it
    rows: Count
    dim: Dim
    features: list[str] = Field(default_factory=list)


class ParityConfig(Section):
    """A twin; see ``torchrec_ext.twin.Description``. With ``sharding_type`` its halves are sharded.

    ``tolerance`` bounds ``|ours - FBGEMM's| / max(1, |FBGEMM's|)``.
    """

    optimizer: OptimizerConfig
    tables: list[TableConfig] = Field(min_length=1)
    sharding_type: ShardingTypeName | None = None
    pooling: Pooling = "sum"
    weighted: bool = False
    weights_precision: Precision = "fp32"
    max_gradient: float | None = Field(None, gt=0, allow_inf_nan=False)
    batch_size: Count = 16
    longest_bag: Count = 6
    index_dtype: Literal["int32", "int64"] = "int64"
    seed: Seed = 0
    steps: Count = 20
    tolerance: float = Field(1e-5, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ours(self) -> ParityConfig:
        if self.optimizer.ours is None:
            name = self.optimizer.type.removeprefix("fbgemm_")
            reason = f"{self.optimizer.type} is FBGEMM's half of the twin; write {name}"
            raise key_error("optimizer.type", reason)
        return self

    def description(self) -> Description:
        """Give the twin's description.

        Raises:
            UserError: If it is not legal, or FBGEMM has no counterpart.
        """
        assert self.optimizer.ours is not None
        tables = [Table(t.name, t.rows, t.dim, tuple(t.features)) for t in self.tables]
        try:
            return Description(
                tuple(tables),
                self.optimizer.ours,
                self.optimizer.hyperparameters,
                pooling=self.pooling,
                weighted=self.weighted,
                weights_precision=self.weights_precision,
                max_gradient=self.max_gradient,
                batch_size=self.batch_size,
                longest_bag=self.longest_bag,
                index_dtype=_INDEX_DTYPE[self.index_dtype],
                seed=self.seed,
            )
        except ValueError as error:
            raise UserError(str(error)) from error


def main(argv: Sequence[str] | None = None, prog: str = "torchrec-ext parity") -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None for those of the process.
        prog: Name of the program for help and errors.

    Returns:
        Exit code: 0, 1 where a difference exceeds the tolerance, 2 after an error that the user can
        correct.
    """
    parser = config_parser(
        prog,
        "Train a module of ours and FBGEMM's counterpart on the same batches and print the largest "
        "differences. Start it with torchrun to shard both over several ranks.",
        "optimizer.learning_rate=1",
    )
    return run(ParityConfig, parser.parse_args(argv), compare_halves)


def compare_halves(config: ParityConfig, ranks: Ranks) -> int:
    """Train the twin on every rank, print the table on the first, and give the exit code."""
    twin = ranks.agree(lambda: _build(config, ranks))
    steps: Iterable[Difference] = twin.run(config.steps)
    own = list(tqdm(steps, unit=" comparisons", disable=not ranks.first, leave=False))
    parts: list[list[Difference]] = [[] for _ in range(ranks.world_size)]
    dist.all_gather_object(parts, own)
    found = [difference for part in parts for difference in part]
    worst = largest(found)
    # NaN is above every tolerance.
    different = not worst.value <= config.tolerance
    if ranks.first:
        print(table_of(found))
        verdict = "above" if different else "within"
        print(f"\n{verdict} the tolerance of {config.tolerance:g}: {worst}", flush=True)
    return EXIT_DIFFERENT if different else 0


def _build(config: ParityConfig, ranks: Ranks) -> BareTwin | ShardedTwin:
    description = config.description()
    try:
        if config.sharding_type is not None:
            return ShardedTwin(description, config.sharding_type)
        if ranks.world_size == 1:
            return BareTwin(description)
    # Whatever FBGEMM, TorchRec or the allocator object to lies in the configuration.
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f"the twin cannot be built: {' '.join(str(error).split())}") from error
    raise UserError(f"sharding_type: missing; {ranks.world_size} ranks need one, such as row_wise")
