"""TorchRec's view of our module as an optimizer: learning rate, states and the step clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from torchrec_ext.tbe import TableBatchedEmbeddingBags

_STEP = ".step"


class FusedOptimizer(EmbeddingFusedOptimizer):
    """The fused optimizer of one group of tables.

    Where the optimizer's update depends on the step clock, every table has the state
    ``<table>.step``: the completed updates, int64 ``[1]``, the same on every rank and for every
    sharding plan.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        module: TableBatchedEmbeddingBags,
        pg: dist.ProcessGroup | None,
    ) -> None:
        """Reads the module's states; see ``EmbeddingFusedOptimizer``."""
        super().__init__(config, module, pg)
        self._module = module
        self._stated_step: int | None = None
        if module.saves_step:
            for name, weight in self.params.items():
                table = name.removesuffix(".weight")
                self.state[weight][f"{table}{_STEP}"] = module.iter

    def state_step(self, step: int) -> None:
        """States the clock of a checkpoint that does not hold it, such as one of FBGEMM's ADAM.

        From here to the next :meth:`load_state_dict`, :meth:`state_dict` has no ``step``, so that
        such a checkpoint fits; the load then sets the clock to ``step``.

        Raises:
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step={step} is not legal; it must be an integer >= 0")
        self._stated_step = step

    def state_dict(self) -> dict[str, Any]:
        """TorchRec's state dict, with every row up to date."""
        self._module.flush()
        state_dict = super().state_dict()
        if self._stated_step is not None:
            state_dict["state"] = {
                key: {name: value for name, value in states.items() if not name.endswith(_STEP)}
                for key, states in state_dict["state"].items()
            }
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads states and clock.

        Raises:
            ValueError: A table's ``step`` is missing and was not stated, or tables of this group
                disagree about it. Nothing was loaded.
        """
        self._module.flush()
        if not self._module.saves_step:
            super().load_state_dict(state_dict)
            self._module.set_optimizer_step(int(self._module.iter))
            return
        step = self._step_of(state_dict["state"])
        with_step = {
            key: {**states, **self._step_states(key, step)}
            for key, states in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": with_step})
        self._stated_step = None
        self._module.iter.fill_(step)
        self._module.set_optimizer_step(step)

    def _step_states(self, key: str, step: int) -> dict[str, torch.Tensor]:
        states = self.state[self.params[key]] if key in self.params else {}
        value = torch.full_like(self._module.iter, step)
        return {name: value for name in states if name.endswith(_STEP)}

    def _step_of(self, states_by_key: Mapping[str, Any]) -> int:
        steps = {
            name.removesuffix(_STEP): int(value)
            for states in states_by_key.values()
            for name, value in states.items()
            if name.endswith(_STEP)
        }
        if self._stated_step is not None and not steps:
            return self._stated_step
        missing = [table for table in self._module.table_labels if table not in steps]
        if missing:
            raise ValueError(
                f"tables {sorted(set(missing))}: the checkpoint has no step, which OptimType."
                f"{self._module.optim_type.name} needs; if FBGEMM wrote it, call state_step(n) on "
                "the fused optimizer first, with the number of updates that had been done"
            )
        if len(set(steps.values())) > 1:
            raise ValueError(
                f"the checkpoint has different steps for tables that are updated together: {steps}"
            )
        return next(iter(steps.values()))
