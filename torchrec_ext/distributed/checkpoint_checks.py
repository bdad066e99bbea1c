"""Checks a state dict against the tables before any of it is loaded.

TorchRec copies state by state: where one does not fit, those before it are overwritten already, and
states of one name but another optimizer's are taken without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.fused_optimizer import FusedOptimizer, ours_in, state_names


def check_states(optimizer: KeyedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks the states of every table of ours.

    Args:
        optimizer: The one that is to load.
        state_dict: What it is to load.

    Raises:
        ValueError: Names each table and state that does not fit, with what was expected and found.
    """
    key_of = {id(weight): key for key, weight in optimizer.params.items()}
    given = state_dict.get("state", {})
    problems = [
        problem
        for part in ours_in(optimizer)
        for weight, own in part.state.items()
        for problem in _problems(part, own, key_of[id(weight)], given)
    ]
    if problems:
        raise ValueError("nothing was loaded:\n" + "\n".join(problems))


def _problems(
    part: FusedOptimizer, own: Mapping[str, Any], key: str, given: Mapping[str, Any]
) -> Iterator[str]:
    table = key.removesuffix(".weight").rpartition(".")[2]
    name = f"OptimType.{part.module.optim_type.name}"
    if key not in given:
        yield f"table {table!r}: the checkpoint has no states under {key!r}, which {name} needs"
        return
    found = given[key]
    expected = {state: global_shape(value) for state, value in own.items()}
    if found.keys() != expected.keys():
        yield (
            f"table {table!r}: the checkpoint has the states {state_names(found)}, but {name} has "
            f"{state_names(expected)}; it was written with another optimizer or other settings"
        )
        return
    for state, shape in expected.items():
        if global_shape(found[state]) != shape:
            yield (
                f"table {table!r}: state {state_names([state])[0]!r} has shape "
                f"{global_shape(found[state])} in the checkpoint, expected {shape}"
            )


def global_shape(value: Any) -> tuple[int, ...] | None:
    """Of a tensor of one rank, or of the whole that ranks have shards of."""
    if isinstance(value, ShardedTensor):
        return tuple(value.metadata().size)  # its size() warns that there is a newer class
    if isinstance(value, Tensor):
        return tuple(value.size())
    return None
