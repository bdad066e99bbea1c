"""Fits a load from ``torch.distributed.checkpoint`` to the plan, or refuses it.

Every rank plans a load before any reads: what is refused there is refused on all ranks, with
nothing overwritten. Each entry is read in the size it was saved in, so entries of the other of two
sizes are replaced here by room for the saved one, which ``load_state_dict`` then fits to the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_ext.distributed.checkpoint_checks import (
    global_shape,
    is_torchrecs_form,
    name_problem,
    size_problem,
)
from torchrec_ext.distributed.description import DESCRIPTIONS, STEP, Description
from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.distributed.saved_form import FIRST_STATE, room_for


def prepare(state_dict: dict[str, Any], metadata: Metadata, partial: bool) -> None:
    """Checks a state dict against a checkpoint, and makes room in it for what that holds.

    Args:
        state_dict: What ``torch.distributed.checkpoint`` is to load into, nested. Entries are
            replaced where the checkpoint has the other size, or does not describe the optimizer
            because FBGEMM's wrote it.
        metadata: The checkpoint's.
        partial: Whether entries may be missing there.

    Raises:
        ValueError: Names each table and state that does not fit, with what was expected and found.
    """
    saved: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        table, _, name = key.rpartition(".")
        saved.setdefault(table, {})[name] = entry
    problems: list[str] = []
    tables = list(_described(state_dict))
    for place, states, table, own in tables:
        problems += _problems(own, states, table, saved.get(f"{place}{table}", {}), partial)
    for place, others, table in _others(state_dict):
        problems += _problems_of_others(others, table, saved.get(f"{place}{table}", {}))
    if problems:
        raise ValueError("nothing was loaded:\n" + "\n".join(problems))
    for place, states, table, own in tables:
        _make_room(states, table, own, saved.get(f"{place}{table}", {}))


def part_of_this_rank(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank has of a nested state dict: no sharded tensors of others, no dicts of nothing.

    torch asks the checkpoint for empty dicts, and for dicts of plain values as a whole where a
    sharded tensor has no shard here: then it takes the checkpoint for one of torch 2.3.

    Args:
        content: The state dict.

    Returns:
        New dicts, with the same values.
    """
    part = {
        key: part_of_this_rank(value) if isinstance(value, dict) else value
        for key, value in content.items()
    }
    return {key: value for key, value in part.items() if not _is_elsewhere(value)}


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, ShardedTensor):
        return not value.local_shards()
    return isinstance(value, dict) and not value


def _described(
    content: dict[str, Any], place: str = ""
) -> Iterator[tuple[str, dict[str, Any], str, Description]]:
    """The tables of ours in a nested state dict.

    Yields: the path, the dict that has the states, the beginning of their keys, the description.
    """
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _described(value, f"{place}{key}.")
        elif isinstance(key, str) and isinstance(value, torch.Tensor):
            table, _, name = key.rpartition(".")
            described = Description.from_tensor(name, value)
            if described is not None:
                yield place, content, table, described


def _problems(
    own: Description,
    states: Mapping[str, Any],
    table: str,
    found: Mapping[str, Any],
    partial: bool,
) -> list[str]:
    label = table.rpartition(".")[2]
    if not found and not partial:
        return [
            f"table {label!r}: the checkpoint has no states of it, which OptimType."
            f"{own.optimizer.name} needs; for weights alone, leave the optimizer out of the state "
            "dict"
        ]
    expected = [name for name in own.state_names if f"{table}.{name}" in states]
    stated = [name for name in own.state_names if name not in expected and name == STEP]
    if stated and STEP in found:
        return [
            f"table {label!r}: state_step() was called, but the checkpoint has a step of its own; "
            "leave the call out"
        ]
    if STEP in expected and found and STEP not in found and own.name not in found:
        return [
            f"table {label!r}: the checkpoint has no step, which OptimType.{own.optimizer.name} "
            "needs; if FBGEMM wrote it, first call torchrec_ext.distributed.state_step("
            "fused_optimizer, step) with the number of updates that had been done"
        ]
    missing = [name for name in expected if name not in found] if partial else []
    problem = name_problem(own, label, [*found, *stated, *missing])
    if problem is not None:
        return [problem]
    sizes = {
        name: tuple(entry.size)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checked = (
        size_problem(own, label, name, size)
        for name, size in sizes.items()
        if not is_torchrecs_form(own, name, states.get(f"{table}.{name}"))
    )
    return [problem for problem in checked if problem is not None]


def _others(
    content: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """The tables of FBGEMM's optimizers: what :func:`_described` yields, less the description."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _others(value, f"{place}{key}.")
        elif isinstance(key, str) and key.endswith(f".{FIRST_STATE}"):
            table = key.removesuffix(f".{FIRST_STATE}")
            if not any(f"{table}.{name}" in content for name in DESCRIPTIONS):
                yield place, content, table


def _problems_of_others(
    states: Mapping[str, Any], table: str, found: Mapping[str, Any]
) -> list[str]:
    """TorchRec would read ``linear`` of FTRL, say, as the ``sum`` of Adagrad."""
    written = [name for name in found if name in DESCRIPTIONS]
    own = {key.removeprefix(f"{table}.") for key in states if key.startswith(f"{table}.")}
    if not written or own == found.keys() - set(written):
        return []
    return [
        f"table {table.rpartition('.')[2]!r}: the checkpoint was written with "
        f"OptimType.{DESCRIPTIONS[written[0]].name} and has the states "
        f"{[name for name in found if name not in written]}, but the optimizer here is not of "
        f"torchrec_ext and has {sorted(own)}"
    ]


def _make_room(
    states: dict[str, Any], table: str, own: Description, found: Mapping[str, Any]
) -> None:
    if own.name not in found:
        del states[f"{table}.{own.name}"]
    for name, state in own.states.items():
        entry, value = found.get(name), states.get(f"{table}.{name}")
        if state.rowwise and entry is not None and isinstance(value, ShardedTensor):
            size = tuple(entry.size)
            if size != global_shape(value):
                states[f"{table}.{name}"] = room_for(value, size)


def _prepared(original: Function) -> Function:
    @functools.wraps(original)
    def set_up_planner(
        self: Any, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None and self.flatten_state_dict:
            prepare(state_dict, metadata, self.allow_partial_load)
        original(self, state_dict, metadata, is_coordinator)

    return set_up_planner


def _planned(original: Function) -> Function:
    @functools.wraps(original)
    def create_local_plan(self: Any) -> Any:
        whole = self.original_state_dict
        self.original_state_dict = part_of_this_rank(whole)
        try:
            return original(self)
        finally:
            self.original_state_dict = whole

    return create_local_plan


SEAMS = (
    Seam(
        DefaultLoadPlanner,
        "set_up_planner",
        ("self", "state_dict", "metadata", "is_coordinator"),
        _prepared,
    ),
    Seam(DefaultLoadPlanner, "create_local_plan", ("self",), _planned),
)
