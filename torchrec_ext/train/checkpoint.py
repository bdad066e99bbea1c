"""Saving a training run, and restoring it on the same or another number of ranks.

``torch.distributed.checkpoint`` holds what ranks have parts of: weights, the states of all
optimizers with their clocks, which rows occurred, random states. ``training.json`` holds the rest,
equal on all ranks: see :class:`Progress`. The number of steps done is the position in the data,
because an epoch's order follows from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.optim.keyed import KeyedOptimizerWrapper

from torchrec_ext.command.errors import AgreedError, UserError
from torchrec_ext.command.ranks import Ranks
from torchrec_ext.train import checkpoint_folder
from torchrec_ext.train.config import CheckpointConfig, Config
from torchrec_ext.train.data import Split
from torchrec_ext.train.distribute import Distributed
from torchrec_ext.train.history import History
from torchrec_ext.train.tables import TouchedRows

TRAINING = "training.json"
_DCP_METADATA = ".metadata"
_RANDOM_STATE = "random_rank{}"


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says about the run that wrote it.

    Attributes:
        step: Steps done.
        world_size: Ranks.
        data: ``Split.fingerprint`` of its data.
        config: The resolved configuration.
        history: ``History.to_json`` of what happened.
        features: The data's features in their order; empty in checkpoints of older versions.
    """

    step: int
    world_size: int
    data: str
    config: dict[str, Any]
    history: dict[str, Any]
    features: list[str] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run, written by all ranks together.

    Args:
        parent: The folder they are in.
        config: The run's configuration, with a section ``checkpoint``.
        split: The run's data.
        distributed: The model.
        ranks: All ranks, each of which makes the same calls.
    """

    def __init__(
        self, parent: Path, config: Config, split: Split, distributed: Distributed, ranks: Ranks
    ) -> None:
        assert config.checkpoint is not None
        self._settings: CheckpointConfig = config.checkpoint
        self._parent = parent
        self._config = config
        self._data = split.fingerprint()
        self._features = list(split.train.features)
        self._distributed = distributed
        self._ranks = ranks

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after this many steps."""
        return step % self._settings.every_steps == 0

    def save(self, history: History, touched: TouchedRows) -> None:
        """Save between two steps; older checkpoints go when the new one is complete.

        Nothing is done if this step has a complete checkpoint already.

        Args:
            history: Until now.
            touched: The rows that occurred on this rank.

        Raises:
            AgreedError: On every rank, if a file cannot be written. Older checkpoints are as
                they were.
        """
        step = len(history.losses)
        if self._ranks.on_first(lambda: checkpoint_folder.has(self._parent, step)):
            return
        progress = Progress(
            step,
            self._ranks.world_size,
            self._data,
            self._config.model_dump(mode="json"),
            history.to_json(),
            self._features,
        )
        state = state_of(self._distributed, touched.on_any_rank(self._ranks), self._ranks.rank)
        partial = self._on_first(lambda: checkpoint_folder.begin(self._parent, step))
        with _errors_as(f"cannot save {partial}"):
            dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
        # Every rank's files are durable when dcp.save returns on every rank.
        self._ranks.agree(lambda: None)
        self._on_first(lambda: self._finish(partial, progress))

    def _finish(self, partial: Path, progress: Progress) -> None:
        text = json.dumps(asdict(progress), allow_nan=False) + "\n"
        checkpoint_folder.write_durably(partial / TRAINING, text)
        stored = dcp.FileSystemReader(partial).read_metadata().storage_data or {}
        files = {TRAINING, _DCP_METADATA, *(info.relative_path for info in stored.values())}
        checkpoint_folder.publish(partial, files)
        checkpoint_folder.prune(self._parent, self._settings.keep)

    def _on_first(self, work: Callable[[], Any]) -> Any:
        def checked() -> Any:
            try:
                return work()
            except OSError as error:
                raise UserError(f"cannot save a checkpoint: {error}") from error

        return self._ranks.on_first(checked)


def read_progress(folder: Path) -> Progress:
    """Read what a complete checkpoint says about its run.

    Raises:
        UserError: If ``training.json`` cannot be read or is not what ``Checkpoints.save`` writes.
    """
    path = folder / TRAINING
    try:
        progress = Progress(**json.loads(path.read_text(encoding="utf-8")))
        History.from_json(progress.history)
        return progress
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or of another version of this program") from error


def restore(
    folder: Path, saved: Progress, distributed: Distributed, touched: TouchedRows, ranks: Ranks
) -> History:
    """Make the model, its optimizers and the random state those of a checkpoint.

    Args:
        folder: The checkpoint.
        saved: Its ``read_progress``.
        distributed: The model, on any number of ranks and under any plan.
        touched: Gets the rows that occurred before, on any rank.
        ranks: All ranks, each of which makes this call.

    Returns:
        What had happened.

    Raises:
        AgreedError: On every rank, if the checkpoint does not fit this sharding, before anything
            was loaded, or if it cannot be read.
    """
    for _, part in distributed.optimizer.optimizers:
        if isinstance(part, KeyedOptimizerWrapper):
            # torch.optim makes states in the first step, and states are loaded in place.
            part.init_state()
    random_rank = ranks.rank % saved.world_size
    state = state_of(distributed, touched.on_any_rank(ranks), random_rank)
    reader = dcp.FileSystemReader(folder)
    with _errors_as(f"cannot resume {folder}"):
        dcp.load(state, storage_reader=reader)
    distributed.model.load_state_dict(state["model"])
    distributed.optimizer.load_state_dict(state["optimizer"])
    for feature, mask in state["touched"].items():
        touched.add(feature, mask)
    torch.set_rng_state(state[_RANDOM_STATE.format(random_rank)])
    return History.from_json(saved.history)


def state_of(
    distributed: Distributed, touched: Mapping[str, torch.Tensor], random_rank: int
) -> dict[str, Any]:
    """Collect what ``torch.distributed.checkpoint`` writes, or loads into.

    Args:
        distributed: The model.
        touched: ``[rows]`` bool by feature name, equal on every rank.
        random_rank: The rank whose random state this rank has.
    """
    return {
        "model": distributed.model.state_dict(),
        "optimizer": distributed.optimizer.state_dict(),
        "touched": dict(touched),
        _RANDOM_STATE.format(random_rank): torch.get_rng_state(),
    }


@contextmanager
def _errors_as(prefix: str) -> Iterator[None]:
    """Turn what the files of a checkpoint did wrong, on any rank, into one line."""
    try:
        yield
    except CheckpointException as error:
        for rank, (cause, _) in error.failures.items():
            if isinstance(cause, OSError | ValueError | RuntimeError):
                # torch.distributed.checkpoint raises the same on every rank.
                text = " ".join(str(cause).split())
                raise AgreedError(f"{prefix}: rank {rank}: {text}") from error
        raise
