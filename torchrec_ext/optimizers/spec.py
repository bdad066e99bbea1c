"""What the rest of torchrec_ext knows about an optimizer, as data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.hyperparameter import (
    Choice,
    Flag,
    Hyperparameter,
    HyperparameterError,
)
from torchrec_ext.spelling import did_you_mean

AnyHyperparameter = Hyperparameter | Flag | Choice


@dataclass(frozen=True)
class State:
    """One optimizer state.

    Attributes:
        name: Its name; in TorchRec's checkpoints an optimizer's first state is ``momentum1``.
        rowwise: Shape ``[rows]`` where true, ``[rows, D]`` otherwise.
        initial: The hyperparameter that holds its initial value, a function of all of them that
            gives it, or None for zero.
        when: Whether the state exists with given hyperparameters; None: always.
        dtype: float32 for every state of an optimizer, whatever the weights are.
    """

    name: str
    rowwise: bool = False
    initial: str | Callable[[Mapping[str, Any]], float] | None = None
    when: Callable[[Mapping[str, Any]], bool] | None = None
    dtype: torch.dtype = torch.float32

    def bytes_of(self, rows: int, dim: int) -> int:
        """The memory it takes for a table, or a shard of one, of ``rows`` x ``dim``."""
        return (rows if self.rowwise else rows * dim) * self.dtype.itemsize


# Beside the states, with sparse_mode="dense": the update that each row is current to. No part of
# checkpoints, where every row is up to date.
ROW_STEPS = State("row_steps", rowwise=True, dtype=torch.int32)


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer: hyperparameters, states and what it ignores by definition.

    Attributes:
        optimizer: The enum's member.
        hyperparameters: Those that the C++ update reads come first, in its order.
        states: In checkpoint order, which is the C++ update's order; those that always exist come
            first.
        ignored: Keywords that are accepted without effect, each with the reason.
        translate: Rewrites keywords of other libraries into this spec's, before anything else.
        saves_step: Whether the update depends on the step clock, which checkpoints then hold.
        check: Checks that involve several hyperparameters; raises :class:`HyperparameterError`.
        derive: Rewrites, in place, the states that follow from the others and the weights:
            ``derive(weights, states, hyperparameters)``, with some rows of a table and of its
            states in order. None: no state does.
    """

    optimizer: OptimType
    hyperparameters: tuple[AnyHyperparameter, ...]
    states: tuple[State, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    saves_step: Callable[[Mapping[str, Any]], bool] = lambda hyperparameters: False
    check: Callable[[Mapping[str, Any]], None] | None = None
    derive: Callable[[torch.Tensor, Sequence[torch.Tensor], Mapping[str, Any]], None] | None = None

    @property
    def kernel_hyperparameters(self) -> tuple[str, ...]:
        """The names of the hyperparameters that the C++ update reads, in its order."""
        return tuple(h.name for h in self.hyperparameters if h.in_kernel)

    @property
    def keywords(self) -> dict[str, AnyHyperparameter]:
        """Every accepted keyword, aliases included."""
        return {keyword: h for h in self.hyperparameters for keyword in (h.name, *h.aliases)}

    def kernel_values(self, hyperparameters: Mapping[str, Any]) -> list[float]:
        """The values of :attr:`kernel_hyperparameters`, as the C++ update gets them."""
        return [
            h.kernel_value(hyperparameters[h.name]) for h in self.hyperparameters if h.in_kernel
        ]

    def states_for(self, hyperparameters: Mapping[str, Any]) -> tuple[State, ...]:
        """The states that exist with these hyperparameters."""
        return tuple(
            state for state in self.states if state.when is None or state.when(hyperparameters)
        )

    def states_in_memory(self, hyperparameters: Mapping[str, Any]) -> tuple[State, ...]:
        """:meth:`states_for`, and what a module keeps for each row beside them."""
        dense = hyperparameters.get("sparse_mode") == "dense"
        return (*self.states_for(hyperparameters), *((ROW_STEPS,) if dense else ()))

    def resolve(
        self, given: Mapping[str, Any], base: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Completes and validates hyperparameters.

        Args:
            given: Keywords and values, aliases allowed.
            base: The values in force, of hyperparameters that are not given; the defaults where
                None.

        Returns:
            Every hyperparameter by its own name, in the spec's order.

        Raises:
            HyperparameterError: A keyword is unknown, given under two names, its value is not
                legal, or it would change what is fixed in ``base``.
        """
        values = {h.name: h.default if base is None else base[h.name] for h in self.hyperparameters}
        spelled: dict[str, str] = {}
        for keyword, value in self._translated(given).items():
            hyperparameter = self._find(keyword)
            if hyperparameter.name in spelled:
                raise HyperparameterError(
                    f"{self.optimizer.name}: {spelled[hyperparameter.name]} and {keyword} are two "
                    "names of the same hyperparameter; give one of them"
                )
            spelled[hyperparameter.name] = keyword
            valid = hyperparameter.validate(value, keyword, self.optimizer)
            if base is not None and hyperparameter.fixed and valid != base[hyperparameter.name]:
                raise HyperparameterError(
                    f"{self.optimizer.name}: {keyword}={value!r} cannot replace "
                    f"{base[hyperparameter.name]!r} in a built module; build a new one"
                )
            values[hyperparameter.name] = valid
        if self.check is not None:
            self.check(values)
        if base is not None and self.states_for(values) != self.states_for(base):
            raise HyperparameterError(
                f"{self.optimizer.name}: {dict(given)} needs other optimizer states than the built "
                "module has; build a new one"
            )
        return values

    def meaning_of_states(self, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters without which states cannot be read, and so are fixed."""
        fixed = [h.name for h in self.hyperparameters if h.fixed and h.in_kernel]
        return {name: hyperparameters[name] for name in fixed}

    def initial_value(self, state: State, hyperparameters: Mapping[str, Any]) -> float:
        """The value that every element of ``state`` starts from."""
        if isinstance(state.initial, str):
            return hyperparameters[state.initial]
        return 0.0 if state.initial is None else state.initial(hyperparameters)

    def _translated(self, given: Mapping[str, Any]) -> dict[str, Any]:
        keywords = dict(given) if self.translate is None else self.translate(dict(given))
        for keyword in keywords.keys() & self.ignored.keys():
            warnings.warn(
                f"{self.optimizer.name} ignores {keyword}={keywords.pop(keyword)!r}: "
                f"{self.ignored[keyword]}",
                stacklevel=3,
            )
        return keywords

    def _find(self, keyword: str) -> AnyHyperparameter:
        hyperparameter = self.keywords.get(keyword)
        if hyperparameter is None:
            raise HyperparameterError(
                f"{self.optimizer.name} has no hyperparameter {keyword!r}; "
                f"it has {', '.join(sorted(self.keywords))}"
                f"{did_you_mean(keyword, sorted(self.keywords))}"
            )
        return hyperparameter
