"""Weights that were loaded without the states that go with them.

FTRL computes a weight from its states alone: the first update of a row whose weight was loaded
without them would return to what the old states stand for. Other optimizers go on from any weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class LoadHistory:
    """What :class:`LoadedWeights` knows of a table.

    Attributes:
        is_alone: Its weights were loaded without their states.
        had_update: It was updated, or its states were loaded.
        had_states: Its states were loaded since its last update.
    """

    is_alone: bool
    had_update: bool
    had_states: bool


class LoadedWeights:
    """Which tables of a module have such weights.

    Args:
        follow_states: Whether the optimizer computes weights from states.
        preserves: Whether a row's first update starts from its weight, whatever it is.
    """

    def __init__(self, follow_states: bool, preserves: bool) -> None:
        """See the class."""
        self._follow_states = follow_states
        self._preserves = preserves
        self._alone: set[str] = set()
        self._had_update = False
        self._had_states = False

    def weights_loaded(self, tables: Iterable[str]) -> None:
        """Notes weights, unless their states were loaded since the last update."""
        is_new = self._preserves and not self._had_update
        if self._follow_states and not self._had_states and not is_new:
            self._alone |= set(tables)

    def states_loaded(self) -> None:
        """Notes the states of all tables."""
        self._had_states = self._had_update = True
        self._alone.clear()

    def states_written(self, tables: Iterable[str]) -> None:
        """Notes that the states of these tables are now what their weights need."""
        self._alone -= set(tables)

    def loaded_with_states(self, tables: Iterable[str]) -> None:
        """Notes weights of these tables that came with their states."""
        self._had_update = True
        self.states_written(tables)

    def before_update(self) -> None:
        """Checks that weights and states belong together.

        Raises:
            RuntimeError: Names the tables whose loaded weights the update would discard.
        """
        if self._alone:
            raise RuntimeError(
                f"tables {sorted(self._alone)}: weights were loaded without their optimizer's "
                "states, from which FTRL computes them: the update would discard them. Load the "
                "states as well, or call torchrec_ext.distributed.derive_optimizer_states("
                "model.fused_optimizer) to go on from the weights"
            )
        self._had_update, self._had_states = True, False

    def history_of(self, table: str) -> LoadHistory:
        """What is known of a table, for the module that it moves to."""
        return LoadHistory(table in self._alone, self._had_update, self._had_states)

    def go_on(self, histories: Mapping[str, LoadHistory]) -> None:
        """Takes over what other modules knew of this one's tables."""
        self._alone = {table for table, history in histories.items() if history.is_alone}
        self._had_update = any(history.had_update for history in histories.values())
        self._had_states = all(history.had_states for history in histories.values())
