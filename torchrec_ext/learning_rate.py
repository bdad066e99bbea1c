"""Where a module's learning rate comes from besides ``set_learning_rate``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class HasParamGroups(Protocol):
    """An optimizer, as far as a learning rate goes."""

    param_groups: Sequence[Mapping[str, Any]]


class LearningRateSource:
    """Follows the ``lr`` of an optimizer's ``param_groups``, which schedulers write to.

    TorchRec hands it to the module in ``step()`` and ``zero_grad()`` only, which is a step late, or
    never, where a loop calls them in another order than TorchRec has in mind. A module that asks
    when its update runs has the right one in every order.

    Copies, such as those that ``copy.deepcopy`` of a module makes, follow nothing.
    """

    def __init__(self) -> None:
        self._optimizer: weakref.ref[HasParamGroups] | None = None
        self._seen: float | None = None

    def follow(self, optimizer: HasParamGroups) -> None:
        """Starts from the optimizer's present ``lr``."""
        self._optimizer = weakref.ref(optimizer)
        self._seen = float(optimizer.param_groups[0]["lr"])

    def pull(self, set_learning_rate: Callable[[float], None]) -> None:
        """Hands on the optimizer's ``lr`` where it changed since the last one that was legal."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return
        value = float(optimizer.param_groups[0]["lr"])
        if value != self._seen:
            set_learning_rate(value)
            self._seen = value

    def __deepcopy__(self, memo: dict[int, Any]) -> LearningRateSource:
        return LearningRateSource()
