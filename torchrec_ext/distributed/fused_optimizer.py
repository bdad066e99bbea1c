"""TorchRec's view of our module as an optimizer: learning rate, states and the step clock."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

from torchrec_ext.distributed.description import STEP, Description
from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.distributed.saved_form import SavedTable
from torchrec_ext.optimizer_clock import check_step
from torchrec_ext.tbe import TableBatchedEmbeddingBags

_STEP = f".{STEP}"
_states_hidden = False


@contextlib.contextmanager
def states_hidden() -> Iterator[None]:
    """While open, optimizers look as if they had no states, to what would move some of them."""
    global _states_hidden
    before, _states_hidden = _states_hidden, True
    try:
        yield
    finally:
        _states_hidden = before


def are_states_hidden() -> bool:
    """Whether :func:`states_hidden` is open."""
    return _states_hidden


class FusedOptimizer(EmbeddingFusedOptimizer):
    """The fused optimizer of one group of tables.

    ``state`` has every table in the form of checkpoints, see
    :mod:`torchrec_ext.distributed.saved_form`; of tables that are ``DTensor``, as under
    ``DMPCollection``, in TorchRec's form, whose ``[rows]`` states fit plans of as many column
    shards only. Where the optimizer's update depends on the step clock, every table has the state
    ``<table>.step``: the completed updates, int64 ``[1]``, the same on every rank and for every
    sharding plan.

    The learning rate in ``param_groups`` is read when an update runs, so that every order of a
    scheduler's ``step()``, ``zero_grad()``, backward and ``step()`` has the one of its moment.

    TorchRec combines many of these into one and then reads and writes ``state`` directly, so this
    is where rows are brought up to date, and ``post_load_state_dict`` where the clock is set.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        module: TableBatchedEmbeddingBags,
        pg: dist.ProcessGroup | None,
        of_table: tuple[str, Any] | None = None,
    ) -> None:
        """Reads the module's states; see ``EmbeddingFusedOptimizer``.

        Args:
            config: The group of tables.
            module: Theirs.
            pg: The ranks of the plan.
            of_table: A table's name and parameter, for an optimizer of that table alone, which the
                module does not follow.
        """
        self.module = module
        self.tables = config.embedding_tables
        self.stated_step: int | None = None
        # By parameter, because TorchRec puts prefixes before the names in ``params`` later on.
        self.saved_tables: dict[Any, SavedTable] = {}
        self.step_names: dict[Any, str] = {}
        self.is_dtensor = self.tables[0].dtensor_metadata is not None
        table, weight = of_table or (None, None)
        # TorchRec's form of states, for which it cannot describe ``[rows]`` states of every plan.
        nothing: list[dict[str, Any]] = [{} for _ in self.tables]
        super().__init__(
            config, module, pg, table, weight, None, None if self.is_dtensor else nothing
        )
        self._is_followed = of_table is None
        self._follow()
        states = module.split_optimizer_states()
        for name, weight in self.params.items():
            own = table or name.removesuffix(".weight")
            self.saved_tables[weight] = SavedTable.of(own, self.tables, states, module, pg)
            if module.saves_step:
                self.step_names[weight] = own + _STEP

    def _follow(self) -> None:
        if self._is_followed:
            self.module.follow_learning_rate(self)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The states by parameter, every row up to date; without ``step`` while one is stated."""
        self.module.flush()
        return {weight: self._states_of(weight) for weight in self.saved_tables}

    @state.setter
    def state(self, state: dict[Any, dict[str, Any]]) -> None:
        self._state = state

    def _states_of(self, weight: Any) -> dict[str, Any]:
        if _states_hidden:
            return {}
        table = self.saved_tables[weight]
        states: dict[str, Any] = dict(self._state[weight]) if self.is_dtensor else table.states()
        if self.stated_step is None and weight in self.step_names:
            states[self.step_names[weight]] = self.module.iter
        described = self.description(weight)
        states[f"{table.name}.{described.name}"] = described.to_tensor()
        return states

    def description(self, weight: Any) -> Description:
        """What checkpoints say about a parameter's optimizer."""
        self.module.pull_learning_rate()  # of a scheduler, say, since the last update
        table = self.saved_tables[weight]
        return Description(
            self.module.optim_type, table.rows, table.dim, dict(self.module.hyperparameters)
        )

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hands on the learning rate, as TorchRec does."""
        super().zero_grad(set_to_none)
        self._follow()  # what was handed on counts as seen

    def step(self, closure: Any = None) -> None:
        """Hands on the learning rate, as TorchRec does."""
        super().step(closure)
        self._follow()

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Changes hyperparameters; ``zero_grad`` would hand on the former learning rate."""
        self.module.pull_learning_rate()  # of a scheduler, say, since the last update
        super().update_hyper_parameters(params_dict)
        for group in self.param_groups:
            group["lr"] = self.module.get_learning_rate()
        self._follow()

    def post_load_state_dict(self) -> None:
        """Goes on from the loaded clock."""
        step = int(self.module.iter) if self.stated_step is None else self.stated_step
        self.stated_step = None
        self.module.set_optimizer_step(step)
        self.module.loaded_weights.states_loaded()


def state_step(optimizer: KeyedOptimizer, step: int) -> None:
    """States the clock of a checkpoint that does not hold it, such as one of FBGEMM's ADAM.

    Until the next ``load_state_dict``, ``optimizer.state_dict()`` has no ``step``, so that such a
    checkpoint fits; the load then sets the clocks to ``step``.

    Args:
        optimizer: ``model.fused_optimizer``, or an optimizer that contains it.
        step: The updates that had been done when the checkpoint was written.

    Raises:
        ValueError: ``step`` is no legal number of updates, or this rank has tables and none of
            their optimizers depends on the clock.
    """
    ours = list(ours_in(optimizer))
    check_step(step, [table for each in ours for table in each.module.table_labels])
    clocks = [each for each in ours if each.module.saves_step]
    if ours and not clocks:  # a rank without tables has nothing to state
        raise ValueError("no table here has an optimizer with a step clock; leave this call out")
    for clock in clocks:
        clock.stated_step = step


def derive_optimizer_states(optimizer: KeyedOptimizer) -> None:
    """Goes on from weights that were loaded without the states that belong to them.

    FTRL computes a weight from its states, so that without this its next update would be an error.
    Rewrites the states that follow from the weights, in every table that has such: FTRL's
    ``linear``; see ``TableBatchedEmbeddingBags.derive_optimizer_states``.

    Args:
        optimizer: ``model.fused_optimizer``, or an optimizer that contains it.
    """
    for part in ours_in(optimizer):
        if part.module.derives_states:
            part.module.derive_optimizer_states()


def check_steps(optimizer: KeyedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks the clocks in a state dict that is about to be loaded.

    Raises:
        ValueError: A table's ``step`` is missing and was not stated, is there although it was, or
            tables that are updated together disagree about it.
    """
    key_of = {id(weight): key for key, weight in optimizer.params.items()}
    given = state_dict.get("state", {})
    for clock in ours_in(optimizer):
        steps: dict[str, int | None] = {}
        for weight, name in clock.step_names.items():
            step = given.get(key_of[id(weight)], {}).get(name)
            steps[name.removesuffix(_STEP)] = None if step is None else int(step)
        _check_group(clock, steps)


def _check_group(clock: FusedOptimizer, steps: Mapping[str, int | None]) -> None:
    name = clock.module.optim_type.name
    missing = sorted(table for table, step in steps.items() if step is None)
    if clock.stated_step is not None and len(missing) < len(steps):
        stated, clock.stated_step = clock.stated_step, None
        raise ValueError(
            f"state_step({stated}) was called, but the checkpoint has steps of its own: "
            f"{dict(steps)}; the call is withdrawn, load again without it"
        )
    if missing and clock.stated_step is None:
        raise ValueError(
            f"tables {missing}: the checkpoint has no step, which OptimType.{name} needs; if "
            "FBGEMM wrote it, first call torchrec_ext.distributed.state_step(fused_optimizer, "
            "step) with the number of updates that had been done"
        )
    if len(set(steps.values())) > 1:
        raise ValueError(
            "the checkpoint has different steps for tables that are updated together: "
            f"{dict(steps)}"
        )


def state_names(keys: Iterable[str]) -> list[str]:
    """The states' names, without the table's before them."""
    return [key.rpartition(".")[2] for key in keys]


def ours_in(optimizer: Any) -> Iterator[FusedOptimizer]:
    """Ours among the optimizers that one is made of."""
    if isinstance(optimizer, FusedOptimizer):
        yield optimizer
    elif isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from ours_in(part)
    elif isinstance(optimizer, OptimizerWrapper):
        yield from ours_in(optimizer._optimizer)


def _updated_together(original: Function) -> Function:
    @functools.wraps(original)
    def update_hyper_parameters(self: Any, params_dict: dict[str, Any]) -> None:
        for part in ours_in(self):  # before the first of them is changed
            part.module.resolve_hyper_parameters(params_dict)
        original(self, params_dict)

    return update_hyper_parameters


SEAMS = (
    Seam(
        CombinedOptimizer,
        "update_hyper_parameters",
        ("self", "params_dict"),
        _updated_together,
    ),
)
