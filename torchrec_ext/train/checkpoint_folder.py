"""Checkpoints on disk: a folder is a complete checkpoint or none.

A checkpoint is written into ``step-<step>.partial``, made durable, and renamed to ``step-<step>``:
the rename is the moment from which it exists. Its ``manifest.json`` lists the files and their
sizes. An old one is renamed to ``step-<step>.removed`` before its files go. So a crash at any
moment leaves checkpoints that are whole, and leftovers that no one takes for one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from torchrec_ext.command.errors import UserError

#: The folder of the checkpoints below a run's.
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{10}")
_PARTIAL, _REMOVED = ".partial", ".removed"


def begin(parent: Path, step: int) -> Path:
    """Create the folder to write a checkpoint into; leftovers of interrupted saves go.

    Args:
        parent: The folder of all checkpoints of a run, created if it is missing.
        step: Steps done.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.iterdir():
        if path.suffix in (_PARTIAL, _REMOVED) and _NAME.fullmatch(path.stem):
            shutil.rmtree(path)
    partial = parent / (_name(step) + _PARTIAL)
    partial.mkdir()
    return partial


def publish(partial: Path, files: Iterable[str]) -> Path:
    """Turn what lies in the folder of ``begin`` into a checkpoint.

    Args:
        partial: The folder; every rank has written its files and made them durable.
        files: The names of all files that belong to the checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: If a file is missing.
    """
    sizes = {}
    for name in sorted(files):
        if not (partial / name).is_file():
            raise UserError(
                f"cannot save a checkpoint: {partial / name} is not there; the run folder must be "
                "on a file system that the hosts of all ranks share"
            )
        sizes[name] = (partial / name).stat().st_size
    write_durably(partial / MANIFEST, json.dumps({"files": sizes}, indent=2) + "\n")
    _make_durable(partial)
    folder = partial.with_suffix("")
    if folder.exists():  # a damaged one: where there is a complete one, nothing is saved
        _remove(folder)
    partial.rename(folder)
    _make_durable(folder.parent)
    return folder


def prune(parent: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete checkpoints."""
    for folder in complete(parent)[:-keep]:
        _remove(folder)


def complete(parent: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first."""
    if not parent.is_dir():
        return []
    return [path for path in sorted(parent.iterdir()) if is_name(path) and problem(path) is None]


def has(parent: Path, step: int) -> bool:
    """Whether there is a complete checkpoint of a step."""
    return problem(parent / _name(step)) is None


def is_name(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def find(folder: Path, label: str) -> Path:
    """Find the checkpoint that a folder stands for.

    Args:
        folder: A checkpoint, which stands for itself, or a run folder, for its newest one.
        label: What to begin errors with.

    Raises:
        UserError: There is no complete checkpoint.
    """
    if is_name(folder.resolve()):  # it may be given as "." or by a link
        found = problem(folder)
        if found is not None:
            raise UserError(f"{label}: not a complete checkpoint: {found}")
        return folder
    parent = folder / CHECKPOINTS
    checkpoints = complete(parent)
    if not checkpoints:
        raise UserError(
            f"{label}: there is no complete checkpoint in {parent}; checkpoint.every_steps makes "
            "runs save some, in folders named step-<step>"
        )
    return checkpoints[-1]


def problem(folder: Path) -> str | None:
    """Say why a folder is no complete checkpoint; None if it is one."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        found = {name: (folder / name).stat().st_size for name in sizes}
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / MANIFEST} is damaged"
    for name, size in sizes.items():
        if found[name] != size:
            return f"{folder / name} has {found[name]} bytes, expected {size}"
    return None


def write_durably(path: Path, text: str) -> None:
    """Write a file whose content survives a crash of the machine."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _name(step: int) -> str:
    return f"step-{step:010d}"


def _remove(folder: Path) -> None:
    aside = folder.with_suffix(_REMOVED)
    folder.rename(aside)
    shutil.rmtree(aside)


def _make_durable(folder: Path) -> None:
    """Make a folder's entries durable, which fsync of the files does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
