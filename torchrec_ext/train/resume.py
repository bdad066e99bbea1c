"""Where a run goes on: which checkpoint, and whether the configuration still fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_ext.command.errors import UserError
from torchrec_ext.train import checkpoint_folder
from torchrec_ext.train.checkpoint import Progress, read_progress
from torchrec_ext.train.config import Config

#: Keys, or beginnings of keys, that may change between a checkpoint and its continuation: they
#: decide neither what a step computes nor what comes before it. The data itself is compared.
FREE_KEYS = (
    "name",
    "data.path",
    "train.epochs",
    "train.max_steps",
    "train.abort_seconds",
    "train.zeros_every_steps",
    "sharding.",
    "checkpoint.",
)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from.

    Attributes:
        folder: The checkpoint.
        run: The run folder to go on in; None if the run gets one of its own.
        progress: What the checkpoint says about its run.
    """

    folder: Path
    run: Path | None
    progress: Progress


def find_resume_point(resume: str, output: str | None) -> ResumePoint:
    """Find the checkpoint that ``--resume`` means.

    Args:
        resume: A run folder, a single checkpoint, or empty for the run folder ``output``.
        output: The run folder, or None. Another one than that of the checkpoint starts a new run
            there, as does a single checkpoint.

    Raises:
        UserError: If there is no complete checkpoint.
    """
    if not resume and output is None:
        raise UserError(
            "--resume needs a folder: --resume RUN, a checkpoint, or --output RUN beside it"
        )
    folder = Path(resume or output or "")
    found = checkpoint_folder.find(folder, f"--resume {folder}")
    # A single checkpoint is its own, and gets a run folder of its own.
    same = output is None or Path(output).resolve() == folder.resolve()
    run = folder if found != folder and same else None
    return ResumePoint(found, run, read_progress(found))


def check_resumable(point: ResumePoint, config: Config, data: str, steps: int) -> None:
    """Check that a run of this configuration would have come to the checkpoint.

    Args:
        point: Where to go on.
        config: The present configuration.
        data: ``Split.fingerprint`` of the present data.
        steps: Steps that the present configuration trains for, from the beginning.

    Raises:
        UserError: Names every key that differs with both values, or says what else differs.
    """
    saved = point.progress
    before, now = (dict(_flat(each)) for each in (saved.config, config.model_dump(mode="json")))
    different = [
        f"{key} is {_text(before.get(key))} in the checkpoint and {_text(now.get(key))} now"
        for key in [*before, *(key for key in now if key not in before)]
        if before.get(key) != now.get(key) and not f"{key}.".startswith(FREE_KEYS)
    ]
    if different:
        raise UserError(
            f"cannot resume {point.folder}: {'; '.join(different)}; set what it was, or start anew"
        )
    if data != saved.data:
        raise UserError(
            f"cannot resume {point.folder}: data: other examples than it was written on"
        )
    if saved.step > steps:
        raise UserError(
            f"cannot resume {point.folder}: it has done {saved.step} steps, and train.epochs and "
            f"train.max_steps end at {steps}"
        )


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _text(value: Any) -> str:
    return "not set" if value is None else repr(value)
