"""What a checkpoint says about the optimizer of a table: which it is, and its hyperparameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrec_ext.distributed.saved_form import COLUMNS_PER_VALUE, saved_names
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import State, spec_of

STEP = "step"
_HYPERPARAMETERS = "_hyperparameters"
#: The optimizers by the names of their descriptions.
DESCRIPTIONS = {f"{optimizer.name}{_HYPERPARAMETERS}": optimizer for optimizer in OptimType}
# Of the JSON object, so that its size does not depend on what it says.
_BYTES = 2048


@dataclass(frozen=True)
class Description:
    """A table's optimizer, beside its states in a checkpoint.

    It is saved as a tensor: of other objects ``torch.distributed.checkpoint`` saves rank 0's alone,
    which may not have the table.

    Attributes:
        optimizer: Which.
        rows: Of the whole table.
        dim: Of the whole table.
        hyperparameters: Those in force, by name.
    """

    optimizer: OptimType
    rows: int
    dim: int
    hyperparameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name among the states: the optimizer's is part of it, so that it fits no other."""
        return self.optimizer.name + _HYPERPARAMETERS

    @property
    def states(self) -> dict[str, State]:
        """The optimizer's states by their names in checkpoints."""
        states = spec_of(self.optimizer).states_for(self.hyperparameters)
        return dict(zip(saved_names(states), states, strict=True))

    @property
    def state_names(self) -> list[str]:
        """The names of the states in checkpoints, ``step`` among them."""
        has_step = spec_of(self.optimizer).saves_step(self.hyperparameters)
        return [*self.states, *([STEP] if has_step else [])]

    def sizes(self, state: State) -> list[tuple[int, ...]]:
        """The sizes that a saved state may have."""
        if not state.rowwise:
            return [(self.rows, self.dim)]
        values = [
            self.dim,
            *([] if self.dim % COLUMNS_PER_VALUE else [self.dim // COLUMNS_PER_VALUE]),
        ]
        return [(self.rows,), *((self.rows, each) for each in values)]

    def to_tensor(self) -> Tensor:
        """uint8, of one size for every optimizer."""
        content = {
            "rows": self.rows,
            "dim": self.dim,
            "hyperparameters": dict(self.hyperparameters),
        }
        text = json.dumps(content).encode().ljust(_BYTES)
        assert len(text) == _BYTES
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @staticmethod
    def from_tensor(name: str, saved: Tensor) -> Description | None:
        """Reads :meth:`to_tensor`'s result, saved under this name; None if it is something else."""
        optimizer = described_optimizer(name)
        if optimizer is None:
            return None
        try:
            return Description(optimizer, **json.loads(bytes(saved.cpu().tolist())))
        except (ValueError, TypeError):
            return None


def described_optimizer(name: str) -> OptimType | None:
    """The optimizer that a state's name describes; None for other names."""
    return DESCRIPTIONS.get(name)
