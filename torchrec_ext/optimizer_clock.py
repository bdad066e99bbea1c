"""A module in time: hyperparameters, step clock, and the rows that sleep through steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchrec_ext import ops
from torchrec_ext.learning_rate import HasParamGroups, LearningRateSource
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizer_states import OptimizerStates
from torchrec_ext.optimizers import HyperparameterError
from torchrec_ext.sleeping_rows import HISTORY_LIMIT, Series, SleepingRows


class OptimizerClock(OptimizerStates):
    """The part of our module that owns the clock and the hyperparameters.

    The clock (the buffer ``iter``) counts completed updates: it advances when a backward has
    updated the tables, whatever the batch held, and at no other time. On CUDA it is there, and so
    are the hyperparameters: a captured graph goes on counting when it is replayed, and follows
    :meth:`set_learning_rate`.
    """

    optim_type: OptimType
    rounding_seed: int
    _table_layout: Tensor
    _kernel_hyperparameters: list[float]
    _sleeping: SleepingRows | None
    _scalars: Tensor | None = None

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The hyperparameters in force; :meth:`update_hyper_parameters` changes them."""
        return MappingProxyType(self._hyperparameters)

    @property
    def saves_step(self) -> bool:
        """Whether the update depends on the clock, so that checkpoints must hold it."""
        return self._spec.saves_step(self._hyperparameters)

    def set_learning_rate(self, lr: float) -> None:
        """Sets the learning rate of the next update.

        Raises:
            HyperparameterError: The optimizer does not allow the value.
        """
        self.update_hyper_parameters({"learning_rate": lr})

    def get_learning_rate(self) -> float:
        """The learning rate, exactly as it was set."""
        return self._hyperparameters["learning_rate"]

    def follow_learning_rate(self, optimizer: HasParamGroups) -> None:
        """Takes the learning rate from an optimizer's ``param_groups`` whenever it changes there.

        It is read when an update runs.

        Args:
            optimizer: Kept by a weak reference.
        """
        self._learning_rate_source.follow(optimizer)

    def pull_learning_rate(self) -> None:
        """Takes over the followed optimizer's learning rate where it has changed."""
        self._learning_rate_source.pull(self.set_learning_rate)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Changes hyperparameters from the next update on. States are not touched.

        In dense mode, changes of other hyperparameters than ``learning_rate`` and ``weight_decay``
        bring all rows up to date first.

        Args:
            params_dict: Values by name; ``lr`` is the learning rate.

        Raises:
            HyperparameterError: A name is unknown or a value is not legal; nothing was changed.
        """
        resolved = self.resolve_hyper_parameters(params_dict)
        if self._sleeping is not None and _shape(resolved) != _shape(self._hyperparameters):
            self.flush()
            self._sleeping.restart(int(self.iter), Series.of(self.optim_type, resolved))
        self._set_hyperparameters(resolved)

    def resolve_hyper_parameters(self, params_dict: Mapping[str, Any]) -> dict[str, Any]:
        """What :meth:`update_hyper_parameters` would make of the hyperparameters.

        Raises:
            HyperparameterError: As there.
        """
        try:
            return self._spec.resolve(params_dict, base=self._hyperparameters)
        except HyperparameterError as error:
            raise HyperparameterError(f"tables {self.table_labels}: {error}") from error

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of completed updates; the next update is number ``step + 1``.

        Raises:
            ValueError: See :func:`check_step`; nothing was changed.
        """
        check_step(step, self.table_labels)
        self.flush()
        self.iter.fill_(step)
        if self._sleeping is not None:
            self._sleeping.restart(step)

    def flush(self) -> None:
        """Brings weights and states up to date: sleeping rows, and FBGEMM's cache."""
        if self._sleeping is not None and self._wake(None):
            self._sleeping.restart(int(self.iter))
        super().flush()

    def split_embedding_weights(self) -> list[Tensor]:
        """The weights as views, ``[rows, D]`` for each table, every row up to date."""
        if self._sleeping is not None:
            self.flush()
        return super().split_embedding_weights()

    def reset_optimizer_states(
        self, table: int | str | None = None, rows: Tensor | Iterable[int] | None = None
    ) -> None:
        """See :meth:`~torchrec_ext.optimizer_states.OptimizerStates.reset_optimizer_states`."""
        if self._sleeping is not None:
            self.flush()
        super().reset_optimizer_states(table, rows)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which follow no learning rate and whose tensors count versions anew."""
        self.pull_learning_rate()
        state: dict[str, Any] = super().__getstate__()
        if self._sleeping is not None:
            state["_weights_version"] -= self.weights_host._version
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :meth:`__getstate__`."""
        super().__setstate__(state)
        if self._sleeping is not None:
            self._weights_version += self.weights_host._version

    def _start_clock(self) -> None:
        self._learning_rate_source = LearningRateSource()
        self.register_buffer("iter", self.iter, persistent=True)
        if not self.use_cpu:
            self._scalars = ops.step_scalars(self._kernel_hyperparameters, 0, self.current_device)
        self._sleeping = None
        self._weights_version = 0
        if self._hyperparameters.get("sparse_mode") == "dense":
            series = Series.of(self.optim_type, self._hyperparameters)
            self._sleeping = SleepingRows(self.total_hash_size, series, 0, self.current_device)
            self.register_state_dict_pre_hook(_flush_before_saving)
            self.register_load_state_dict_post_hook(_restart_after_loading)

    def _set_hyperparameters(self, resolved: dict[str, Any]) -> None:
        values = self._spec.kernel_values(resolved)
        if self._scalars is not None:
            self._write_scalars(self._scalars, values)
        self._hyperparameters = resolved
        self._kernel_hyperparameters = values
        self._set_learning_rate(resolved["learning_rate"])  # FBGEMM's own copy, in float32

    def _write_scalars(self, scalars: Tensor, values: Sequence[float]) -> None:
        """Writes the hyperparameters that changed, without waiting for the device."""
        before = self._kernel_hyperparameters
        changed = [place for place, value in enumerate(values) if before[place] != value]
        if changed and scalars.is_cuda and torch.cuda.is_current_stream_capturing():
            # Every replay would write the value of the capture again.
            raise RuntimeError(
                f"tables {self.table_labels}: a hyperparameter changed inside of a CUDA graph's "
                "capture; call set_learning_rate() or the optimizer's zero_grad() before it"
            )
        written = scalars[1:].view(torch.float64)
        for place in changed:
            written[place].fill_(values[place])

    def _current_scalars(self) -> Tensor | None:
        """The clock and the hyperparameters on a device; None on the CPU."""
        if self._scalars is not None:
            self._scalars[:1].copy_(self.iter)
        return self._scalars

    @torch.no_grad()
    def _wake(self, rows: Tensor | None) -> bool:
        """Catches rows up to the clock; None: all rows. False where no row can have slept."""
        if self._sleeping is None or self.weights_host.is_meta:
            return False
        self._follow_loaded_clock()
        self._follow_written_weights()
        history = self._sleeping.history
        if len(history) == 0:
            return False
        if self.total_hash_size == 0:
            return True
        ops.catch_up(
            self.weights_host,
            self._state_buffers(),
            self._sleeping.row_steps,
            self._table_layout,
            rows,
            history=history.values,
            history_start=history.start,
            window=history.window,
            now=history.now,
            optimizer=self.optim_type,
            hyperparameters=self._kernel_hyperparameters,
            stochastic_rounding=self.stochastic_rounding,
            seed=self.rounding_seed,
        )
        return True

    def _follow_loaded_clock(self, completed: int = 0) -> None:
        """Restarts the history where a checkpoint was loaded into ``iter``.

        Its weights and states were flushed before, as this module's were by ``state_dict()``.
        """
        assert self._sleeping is not None
        now = int(self.iter) - completed
        if self._sleeping.history.now != now:
            self._sleeping.restart(now)

    def _follow_written_weights(self) -> None:
        """Takes weights that were written from outside, by a load for instance, as up to date.

        Whoever writes single rows gets them from :meth:`split_embedding_weights`, which wakes all.
        """
        assert self._sleeping is not None
        version = self.weights_host._version
        if version != self._weights_version:
            self._sleeping.restart(int(self.iter))
            self._weights_version = version

    def _complete_update(self, segments: Sequence[Tensor]) -> None:
        """Advances the clock after an update of the rows in ``segments``."""
        self.iter += 1
        if self._sleeping is None:
            return
        self._follow_loaded_clock(completed=1)
        values = self._hyperparameters
        gain = values["momentum"] if values.get("nesterov", False) else 1.0
        self._sleeping.history.append(values["learning_rate"], values["weight_decay"], gain)
        if segments:
            self._sleeping.row_steps[segments[0]] = int(self.iter)
        if len(self._sleeping.history) >= HISTORY_LIMIT:
            self.flush()


def check_step(step: Any, tables: Sequence[str]) -> None:
    """Checks a number of completed updates.

    Raises:
        ValueError: It is no integer in ``[0, 2^31 - 1)``; names the tables.
    """
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**31 - 1:
        raise ValueError(
            f"tables {list(tables)}: step={step!r} is not legal; it must be an integer >= 0 and "
            "< 2^31 - 1"
        )


def _shape(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the closed form of a sleep holds constant."""
    per_update = ("learning_rate", "weight_decay", "dampening")
    return {name: value for name, value in hyperparameters.items() if name not in per_update}


def _flush_before_saving(module: OptimizerClock, *_: object) -> None:
    module.flush()


def _restart_after_loading(module: OptimizerClock, *_: object) -> None:
    assert module._sleeping is not None
    module._sleeping.restart(int(module.iter))
