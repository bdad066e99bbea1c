"""What the rest of torchrec_ext knows about an optimizer, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torchrec_ext.optim_type import OptimType


class HyperparameterError(ValueError):
    """A hyperparameter is unknown, out of range, of the wrong type, or given twice."""


@dataclass(frozen=True)
class Hyperparameter:
    """One hyperparameter: its name, default and legal range.

    Attributes:
        name: The keyword in ``fused_params`` and in
            :class:`~torchrec_ext.tbe.TableBatchedEmbeddingBags`.
        default: The value where none is given.
        minimum: The least legal value, itself legal unless ``above_minimum``.
        maximum: The greatest legal value.
        above_minimum: Whether the value must be greater than ``minimum``.
        aliases: Other keywords for the same hyperparameter.
        in_kernel: Whether the C++ update reads it. The others only choose initial states.
    """

    name: str
    default: float
    minimum: float = -math.inf
    maximum: float = math.inf
    above_minimum: bool = False
    aliases: tuple[str, ...] = ()
    in_kernel: bool = True

    @property
    def legal_range(self) -> str:
        """The legal values, as text for messages."""
        if self.minimum == -math.inf:
            return (
                "a finite number"
                if self.maximum == math.inf
                else f"a finite number <= {self.maximum:g}"
            )
        lower = f"a finite number {'>' if self.above_minimum else '>='} {self.minimum:g}"
        return lower if self.maximum == math.inf else f"{lower} and <= {self.maximum:g}"

    def validate(self, value: Any, keyword: str, optimizer: OptimType) -> float:
        """Returns ``value`` as a float.

        Raises:
            HyperparameterError: The value is no real number, NaN, infinite or outside of the legal
                range.
        """
        number = (
            float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        )
        legal = math.isfinite(number) and self.minimum <= number <= self.maximum
        if not legal or (self.above_minimum and number == self.minimum):
            raise HyperparameterError(
                f"{optimizer.name}: {keyword}={value!r} is not legal; it must be {self.legal_range}"
            )
        return number


@dataclass(frozen=True)
class State:
    """One optimizer state, float32.

    Attributes:
        name: Its name in checkpoints.
        rowwise: Shape ``[rows]`` where true, ``[rows, D]`` otherwise.
        initial: The hyperparameter that holds its initial value, or None for zero.
    """

    name: str
    rowwise: bool = False
    initial: str | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer: hyperparameters, states and what it ignores by definition.

    Attributes:
        optimizer: The enum's member.
        hyperparameters: Those that the C++ update reads come first, in its order.
        states: In checkpoint order, which is the C++ update's order.
        ignored: Keywords that are accepted without effect, each with the reason.
        check: Checks that involve several hyperparameters; raises :class:`HyperparameterError`.
    """

    optimizer: OptimType
    hyperparameters: tuple[Hyperparameter, ...]
    states: tuple[State, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Mapping[str, float]], None] | None = None

    @property
    def kernel_hyperparameters(self) -> tuple[str, ...]:
        """The names of the hyperparameters that the C++ update reads, in its order."""
        return tuple(h.name for h in self.hyperparameters if h.in_kernel)

    @property
    def keywords(self) -> dict[str, Hyperparameter]:
        """Every accepted keyword, aliases included."""
        return {keyword: h for h in self.hyperparameters for keyword in (h.name, *h.aliases)}

    def resolve(
        self, given: Mapping[str, Any], base: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Completes and validates hyperparameters.

        Args:
            given: Keywords and values, aliases allowed.
            base: The values of hyperparameters that are not given; the defaults where None.

        Returns:
            Every hyperparameter by its own name, in the spec's order.

        Raises:
            HyperparameterError: A keyword is unknown, given under two names, or its value is not
                legal.
        """
        values = (
            dict(base) if base is not None else {h.name: h.default for h in self.hyperparameters}
        )
        spelled: dict[str, str] = {}
        for keyword, value in given.items():
            if keyword in self.ignored:
                continue
            hyperparameter = self._find(keyword)
            if hyperparameter.name in spelled:
                raise HyperparameterError(
                    f"{self.optimizer.name}: {spelled[hyperparameter.name]} and {keyword} are two "
                    "names of the same hyperparameter; give one of them"
                )
            spelled[hyperparameter.name] = keyword
            values[hyperparameter.name] = hyperparameter.validate(value, keyword, self.optimizer)
        if self.check is not None:
            self.check(values)
        return values

    def initial_value(self, state: State, hyperparameters: Mapping[str, float]) -> float:
        """The value that every element of ``state`` starts from."""
        return 0.0 if state.initial is None else hyperparameters[state.initial]

    def _find(self, keyword: str) -> Hyperparameter:
        hyperparameter = self.keywords.get(keyword)
        if hyperparameter is None:
            raise HyperparameterError(
                f"{self.optimizer.name} has no hyperparameter {keyword!r}; "
                f"it has {', '.join(sorted(self.keywords))}"
            )
        return hyperparameter
