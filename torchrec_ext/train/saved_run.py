"""Reading what a checkpoint of a training run holds, in one process and table by table."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchrec_ext.command.config_file import explain
from torchrec_ext.command.errors import UserError
from torchrec_ext.train import checkpoint_folder
from torchrec_ext.train.checkpoint import Progress, read_progress
from torchrec_ext.train.config import Config
from torchrec_ext.train.history import History

_MODEL = "model."
_TABLE = re.compile(r"model\.(?P<collection>.+)\.embedding_bags\.(?P<name>[^.]+)\.weight")
_TOUCHED = "touched."


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint.

    Attributes:
        collection: The module that holds it, such as ``linear.wide``.
        name: Its name, ``<kind>_<feature>``.
        feature: The feature that looks it up.
        key: Its name in the checkpoint.
    """

    collection: str
    name: str
    feature: str
    key: str


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that is open to be read.

    Attributes:
        folder: The checkpoint.
        progress: What it says about its run.
        config: The run's configuration.
        tables: Collection by collection, in the order of each.
        parameters: The names of the model's other parameters.
    """

    folder: Path
    progress: Progress
    config: Config
    tables: tuple[SavedTable, ...]
    parameters: tuple[str, ...]
    _tensors: dict[str, TensorStorageMetadata] = field(repr=False)

    @property
    def history(self) -> History:
        """What had happened."""
        return History.from_json(self.progress.history)

    @property
    def weights(self) -> int:
        """Weights of all tables and other parameters."""
        keys = [*(table.key for table in self.tables), *(_MODEL + name for name in self.parameters)]
        return sum(self._tensors[key].size.numel() for key in keys)

    def optimizer_of(self, table: SavedTable) -> str:
        """Give the type of the optimizer that trained a table."""
        wide = self.config.optimizer
        deep = None if table.name.startswith("wide_") else self.config.deep_optimizer
        return (deep or wide).type

    def read_table(self, table: SavedTable) -> torch.Tensor:
        """Read a whole table, ``[rows, dim]``, under whatever plan it was saved.

        Raises:
            UserError: The files cannot be read.
        """
        return self._read([table.key])[table.key]

    def read_touched(self, table: SavedTable) -> torch.Tensor:
        """Read which rows of a table occurred in training, bool ``[rows]``.

        Raises:
            UserError: The files cannot be read.
        """
        key = _TOUCHED + table.feature
        return self._read([key])[key]

    def read_parameters(self) -> dict[str, torch.Tensor]:
        """Read the model's other parameters, by name.

        Raises:
            UserError: The files cannot be read.
        """
        read = self._read([_MODEL + name for name in self.parameters])
        return {name: read[_MODEL + name] for name in self.parameters}

    def _read(self, keys: list[str]) -> dict[str, torch.Tensor]:
        stored = {key: self._tensors[key] for key in keys}
        state = {
            key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in stored.items()
        }
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        except CheckpointException as error:
            causes = "; ".join(" ".join(str(cause).split()) for cause, _ in error.failures.values())
            raise UserError(f"cannot read {self.folder}: {causes}") from error
        return state


def open_run(folder: Path) -> SavedRun:
    """Open a checkpoint.

    Args:
        folder: A run folder, for its newest checkpoint, or a single checkpoint.

    Raises:
        UserError: There is no complete checkpoint of ``torchrec-ext train``, or this version
            does not read it.
    """
    found = checkpoint_folder.find(folder, f"cannot read {folder}")
    progress = read_progress(found)
    try:
        config = Config.model_validate(progress.config)
    except ValidationError as error:
        raise UserError(f"{found} is of another version: {explain(error, Config)}") from error
    try:
        metadata = dcp.FileSystemReader(found).read_metadata().state_dict_metadata
    except OSError as error:
        raise UserError(f"cannot read {found}: {error}") from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to call for
        raise UserError(f"cannot read {found}: its .metadata is damaged: {error}") from error
    tensors = {k: v for k, v in metadata.items() if isinstance(v, TensorStorageMetadata)}
    tables = _tables(tensors, progress.features)
    keys = {table.key for table in tables}
    others = sorted(key for key in tensors if key.startswith(_MODEL) and key not in keys)
    parameters = tuple(key.removeprefix(_MODEL) for key in others)
    return SavedRun(found, progress, config, tables, parameters, tensors)


def _tables(
    tensors: dict[str, TensorStorageMetadata], features: list[str]
) -> tuple[SavedTable, ...]:
    """Find the tables, whose names have no order in the files."""
    tables = []
    for key in tensors:
        match = _TABLE.fullmatch(key)
        if match is not None:
            feature = match["name"].partition("_")[2]
            tables.append(SavedTable(match["collection"], match["name"], feature, key))
    places = {feature: place for place, feature in enumerate(features)}
    return tuple(sorted(tables, key=lambda t: (t.collection, places.get(t.feature, -1), t.name)))
