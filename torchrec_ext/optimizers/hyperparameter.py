"""The hyperparameters of an optimizer: names, defaults, legal values."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torchrec_ext.optim_type import OptimType

#: Beyond it, squares and reciprocals leave float32's range.
FLOAT32_SAFE = 1e18


class HyperparameterError(ValueError):
    """A hyperparameter is unknown, out of range, of the wrong type, or given twice."""


def _illegal(
    optimizer: OptimType, keyword: str, value: Any, legal_values: str
) -> HyperparameterError:
    return HyperparameterError(
        f"{optimizer.name}: {keyword}={value!r} is not legal; it must be {legal_values}"
    )


@dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter that is a number.

    Attributes:
        name: The keyword in ``fused_params`` and in
            :class:`~torchrec_ext.tbe.TableBatchedEmbeddingBags`.
        default: The value where none is given.
        minimum: The least legal value, itself legal unless ``above_minimum``.
        maximum: The greatest legal value, itself legal unless ``below_maximum``.
        above_minimum: Whether the value must be greater than ``minimum``.
        below_maximum: Whether the value must be less than ``maximum``.
        aliases: Other keywords for the same hyperparameter.
        in_kernel: Whether the C++ update reads it. The others only choose initial states.
        hint: What to do instead, for the error about an illegal value.
    """

    name: str
    default: float
    minimum: float = -FLOAT32_SAFE
    maximum: float = FLOAT32_SAFE
    above_minimum: bool = False
    below_maximum: bool = False
    aliases: tuple[str, ...] = ()
    in_kernel: bool = True
    hint: str = ""

    #: Whether the value must stay what it was when the module was built.
    fixed = False

    @property
    def legal_values(self) -> str:
        """The legal values, as text for messages."""
        least = f"{'>' if self.above_minimum else '>='} {self.minimum:g}"
        most = f"{'<' if self.below_maximum else '<='} {self.maximum:g}"
        hint = f" ({self.hint})" if self.hint else ""
        return f"a finite number {least} and {most}{hint}"

    def validate(self, value: Any, keyword: str, optimizer: OptimType) -> float:
        """Returns ``value`` as a float.

        Raises:
            HyperparameterError: The value is no real number, NaN, infinite or outside of the legal
                range.
        """
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        number = float(value) if is_number else math.nan
        legal = (
            math.isfinite(number)
            and self.minimum <= number <= self.maximum
            and not (self.above_minimum and number == self.minimum)
            and not (self.below_maximum and number == self.maximum)
        )
        if not legal:
            raise _illegal(optimizer, keyword, value, self.legal_values)
        return number

    def kernel_value(self, value: Any) -> float:
        """The number that the C++ update gets for a validated value."""
        return float(value)


@dataclass(frozen=True)
class Flag:
    """A hyperparameter that is on or off.

    Attributes:
        name: As in :class:`Hyperparameter`; so are the attributes not named here.
        default: Whether it is on where nothing is given.
        fixed: Whether the value must stay what it was when the module was built.
    """

    name: str
    default: bool = False
    aliases: tuple[str, ...] = ()
    in_kernel: bool = True
    fixed: bool = False

    #: The legal values, as text for messages.
    legal_values = "True or False"

    def validate(self, value: Any, keyword: str, optimizer: OptimType) -> bool:
        """Returns ``value``.

        Raises:
            HyperparameterError: It is not a bool.
        """
        if not isinstance(value, bool):
            raise _illegal(optimizer, keyword, value, self.legal_values)
        return value

    def kernel_value(self, value: Any) -> float:
        """The number that the C++ update gets for a validated value."""
        return float(value)


@dataclass(frozen=True)
class Choice:
    """A hyperparameter that is one of a few names.

    Attributes:
        name: As in :class:`Hyperparameter`; so are the attributes not named here.
        default: The name where none is given.
        choices: The legal names, each with the number that the C++ update gets. Enum members are
            taken by their name, so FBGEMM's ``WeightDecayMode`` works without importing it here.
        fixed: Whether the value must stay what it was when the module was built.
    """

    name: str
    default: str
    choices: Mapping[str, float] = field(hash=False)
    aliases: tuple[str, ...] = ()
    in_kernel: bool = True
    fixed: bool = False

    @property
    def legal_values(self) -> str:
        """The legal values, as text for messages."""
        return "one of " + ", ".join(self.choices)

    def validate(self, value: Any, keyword: str, optimizer: OptimType) -> str:
        """Returns the chosen name.

        Raises:
            HyperparameterError: There is no such choice.
        """
        name = value.name if isinstance(value, enum.Enum) else value
        if not isinstance(name, str) or name not in self.choices:
            raise _illegal(optimizer, keyword, value, self.legal_values)
        return name

    def kernel_value(self, value: Any) -> float:
        """The number that the C++ update gets for a validated value."""
        return self.choices[value]
