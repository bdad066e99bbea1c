"""Checks a state dict against the tables before any of it is loaded.

TorchRec copies state by state: where one does not fit, those before it are overwritten already, and
states of one name but another optimizer's are taken without a word.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.distributed.description import Description, described_optimizer
from torchrec_ext.distributed.fused_optimizer import (
    FusedOptimizer,
    are_states_hidden,
    ours_in,
    state_names,
)
from torchrec_ext.distributed.saved_form import SavedTable
from torchrec_ext.optimizers import spec_of


def check_states(optimizer: KeyedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks the states of every table of ours.

    Args:
        optimizer: The one that is to load.
        state_dict: What it is to load.

    Raises:
        ValueError: Names each table and state that does not fit, with what was expected and found.

    Warns:
        UserWarning: Hyperparameters differ from those that the states were written with.
    """
    if are_states_hidden():
        return
    given = state_dict.get("state", {})
    problems: list[str] = []
    differences: dict[str, list[str]] = {}
    loaded = ["learning_rate"] if optimizer.defaults["_save_param_groups"] else []
    for part, weight, key in parameters_of_ours(optimizer):
        found = _problems(part, weight, key, given)
        problems += found
        if not found:
            for difference in _differences(part.description(weight), given[key], loaded):
                differences.setdefault(difference, []).append(part.saved_tables[weight].name)
    if problems:
        raise ValueError("nothing was loaded:\n" + "\n".join(problems))
    for difference, tables in differences.items():
        warnings.warn(f"tables {tables}: {difference}", stacklevel=4)


def check_others(optimizer: KeyedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks what TorchRec itself would find, when it has written a part of the states already.

    Args:
        optimizer: The one that is to load.
        state_dict: What it is to load; of our tables, what was checked before.

    Raises:
        ValueError: Names each parameter and state that does not fit.
    """
    given = state_dict["state"]
    ours = {id(weight) for _, weight, _ in parameters_of_ours(optimizer)}
    state = optimizer.state
    problems = [
        problem
        for key, parameter in optimizer.params.items()
        if id(parameter) not in ours and parameter in state
        for problem in _problems_of_other(key, state[parameter], given.get(key))
    ]
    problems += [
        f"parameter {key!r}: it is not among those of this optimizer on this rank; what another "
        "plan saved is loaded through torch.distributed.checkpoint"
        for key in given
        if key not in optimizer.params
    ]
    if optimizer.defaults["_save_param_groups"]:
        own, found = _groups(optimizer.state_dict()), _groups(state_dict)
        problems += [
            f"param_groups of {list(group)}: the checkpoint has {found.get(group)}, the optimizer "
            f"{names}"
            for group, names in own.items()
            if found.get(group) != names
        ]
    if problems:
        raise ValueError("nothing was loaded:\n" + "\n".join(problems))


def _groups(state_dict: Mapping[str, Any]) -> dict[tuple[str, ...], list[str]]:
    """The names of what each group of parameters has."""
    groups = state_dict.get("param_groups", [])
    return {tuple(sorted(group["params"])): sorted(group) for group in groups}


def _problems_of_other(key: str, own: Mapping[str, Any], found: Any) -> Iterator[str]:
    if not isinstance(found, Mapping):
        yield f"parameter {key!r}: the checkpoint has no states of it"
    elif found.keys() != own.keys():
        yield (
            f"parameter {key!r}: the checkpoint has the states {list(found)}, but its optimizer "
            f"has {list(own)}"
        )
    else:
        for name, value in own.items():
            if not _can_be_copied(found[name], value):
                yield (
                    f"parameter {key!r}: state {name!r} is a {_kind(found[name])} in the "
                    f"checkpoint, expected a {_kind(value)}"
                )


def _can_be_copied(found: Any, own: Any) -> bool:
    """Whether TorchRec can; of sharded tensors it compares the number of shards alone."""
    if isinstance(own, ShardedTensor):
        return isinstance(found, ShardedTensor) and (
            len(found.local_shards()) == len(own.local_shards())
        )
    if not isinstance(own, Tensor) or isinstance(own, DTensor):
        return True
    if not isinstance(found, Tensor) or found.dim() > own.dim():
        return False
    pairs = zip(reversed(found.shape), reversed(own.shape), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def _kind(value: Any) -> str:
    local = (
        f" with {len(value.local_shards())} shards here" if isinstance(value, ShardedTensor) else ""
    )
    return f"{type(value).__name__} of shape {global_shape(value)}{local}"


def parameters_of_ours(optimizer: KeyedOptimizer) -> Iterator[tuple[FusedOptimizer, Any, str]]:
    """Every table of ours: its optimizer, its parameter and the parameter's key."""
    key_of = {id(weight): key for key, weight in optimizer.params.items()}
    for part in ours_in(optimizer):
        for weight in part.saved_tables:
            yield part, weight, key_of[id(weight)]


def name_problem(own: Description, table: str, found: list[str]) -> str | None:
    """What is wrong with the names that a checkpoint has for a table, if anything.

    Args:
        own: What the table would be saved as.
        table: Its name.
        found: The checkpoint's names, without the table's before them.
    """
    optimizer = f"OptimType.{own.optimizer.name}"
    written = [each for name in found if (each := described_optimizer(name)) is not None]
    if written and written != [own.optimizer]:
        return (
            f"table {table!r}: the checkpoint was written with OptimType.{written[0].name}, but "
            f"the table has {optimizer}"
        )
    states = [name for name in found if described_optimizer(name) is None]
    if set(states) != set(own.state_names):
        return (
            f"table {table!r}: the checkpoint has the states {states}, but {optimizer} has "
            f"{own.state_names}; it was written with another optimizer or other settings"
        )
    return None


def size_problem(own: Description, table: str, name: str, size: Any) -> str | None:
    """What is wrong with the size that a checkpoint has for a state, if anything."""
    state = own.states.get(name)
    if state is None or size in own.sizes(state):
        return None
    return (
        f"table {table!r}: state {name!r} has shape {size} in the checkpoint, expected "
        f"{own.sizes(state)[0]}"
    )


def is_torchrecs_form(own: Description, name: str, value: Any) -> bool:
    """Whether a state has a size that depends on the plan: of ``[rows]`` for each column shard."""
    return isinstance(value, DTensor) and name in own.states and own.states[name].rowwise


def _problems(part: FusedOptimizer, weight: Any, key: str, given: Mapping[str, Any]) -> list[str]:
    own, table = part.description(weight), part.saved_tables[weight]
    if key not in given:
        return [
            f"table {table.name!r}: the checkpoint has no states under {key!r}, which "
            f"OptimType.{own.optimizer.name} needs"
        ]
    found = dict(zip(state_names(given[key]), given[key].values(), strict=True))
    stated = [] if part.stated_step is None else ["step"]
    problem = name_problem(own, table.name, [*found, *stated])
    if problem is not None:
        return [problem]
    sizes = [
        size_problem(own, table.name, name, global_shape(found[name]))
        for name in own.states
        if not is_torchrecs_form(own, name, found[name])
    ]
    problems = [problem for problem in sizes if problem is not None]
    written = _written(found)
    if written is not None:
        problems += _other_meaning(own, written, table.name)
    return problems or _misplaced(table, found, own)


def _misplaced(table: SavedTable, found: Mapping[str, Any], own: Description) -> list[str]:
    """A state dict in memory that another plan made: TorchRec would copy shard by shard."""
    return [
        f"table {table.name!r}: state {name!r} is sharded in another way than here; save it with "
        "torch.distributed.checkpoint and load it from there"
        for name in own.states
        if not isinstance(found[name], DTensor) and not table.has_places_of(name, found[name])
    ]


def _written(found: Mapping[str, Any]) -> Description | None:
    """What the checkpoint says about the optimizer, where one of ours wrote it."""
    described = [name for name in found if described_optimizer(name) is not None]
    return Description.from_tensor(described[0], found[described[0]]) if described else None


def _other_meaning(own: Description, written: Description, table: str) -> list[str]:
    spec = spec_of(own.optimizer)
    here = spec.meaning_of_states(own.hyperparameters)
    return [
        f"table {table!r}: the checkpoint was written with {name}="
        f"{written.hyperparameters[name]!r}, which says what OptimType.{own.optimizer.name}'s "
        f"states mean, and the table has {value!r}; build it with the checkpoint's"
        for name, value in here.items()
        if written.hyperparameters.get(name, value) != value
    ]


def _differences(
    own: Description, given: Mapping[str, Any], loaded: Sequence[str]
) -> Iterator[str]:
    written = _written(dict(zip(state_names(given), given.values(), strict=True)))
    if written is None:
        return
    before = written.hyperparameters
    changed = [
        f"{each} was {before.get(each)!r} and is {own.hyperparameters.get(each)!r}"
        for each in dict.fromkeys([*own.hyperparameters, *before])
        if each not in loaded and before.get(each) != own.hyperparameters.get(each)
    ]
    if changed:
        yield (
            f"the checkpoint was written with other hyperparameters: {'; '.join(changed)} now; "
            "hyperparameters are not loaded, nor is a scheduler's learning rate: set them again"
        )


def global_shape(value: Any) -> tuple[int, ...] | None:
    """Of a tensor of one rank, or of the whole that ranks have shards of."""
    if isinstance(value, ShardedTensor):
        return tuple(value.metadata().size)  # its size() warns that there is a newer class
    if isinstance(value, Tensor):
        return tuple(value.size())
    return None
