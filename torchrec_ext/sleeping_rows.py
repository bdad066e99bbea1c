"""Rows that batches do not touch, in ``sparse_mode="dense"``.

A dense optimizer moves every row in every update: momentum carries it on, weight decay shrinks it.
Here a row sleeps instead, and is caught up to the clock before it is read. Between the updates
``t`` and ``T`` its gradients were zero, so what it missed has a closed form in three sums that
depend on ``t`` and ``T`` alone, not on the row: with ``lr_s``, ``wd_s`` the hyperparameters of
update ``s``,

.. code-block:: text

    P(t, T) = product over s = t+1 .. T of (1 - lr_s * wd_s)
    C(t, T) = sum over s = t+1 .. T of lr_s * ratio^(s-t) * bias_s * P(s, T)
    E(t, T) = the same sum, each term times eps_gain_s * eps_ratio^(s-t) / ratio^(s-t)

The C++ update (``csrc/catch_up.h``) applies them. :class:`History` keeps them for every ``t`` since
the last flush, at a cost per update that does not grow with the history: the terms fade, so that
after ``window`` updates an entry is no longer added to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers.spec import ROW_STEPS

#: Updates after which all rows are caught up, so that the history can be cut: it takes 24 bytes an
#: update.
HISTORY_LIMIT = 65536
# A term that fell by this factor is below a double's precision of the sum.
_FADED = 1e-16


@dataclass(frozen=True)
class Series:
    """How the steps of a sleeping row fade.

    Attributes:
        ratio: The factor of a step from one update to the next.
        eps_ratio: The same for the step times what eps grows by.
        beta1: Adam's, for the bias corrections; None for SGD.
        beta2: Adam's; None for SGD.
    """

    ratio: float
    eps_ratio: float = 0.0
    beta1: float | None = None
    beta2: float | None = None

    @staticmethod
    def of(optimizer: OptimType, hyperparameters: Mapping[str, Any]) -> Series:
        """The series of an optimizer that has a dense mode."""
        if optimizer == OptimType.ADAM:
            beta1, beta2 = hyperparameters["beta1"], hyperparameters["beta2"]
            return Series(beta1 / math.sqrt(beta2), beta1 / beta2, beta1, beta2)
        return Series(hyperparameters["momentum"])

    def gains(self, update: int) -> tuple[float, float]:
        """The bias correction of a step of this update, and the factor of eps in it."""
        if self.beta1 is None or self.beta2 is None:
            return 1.0, 0.0
        root = math.sqrt(-math.expm1(update * math.log(self.beta2))) if self.beta2 else 1.0
        mean = 1.0 - self.beta1**update
        return root / mean, root


class History:
    """P, C and E from every update since the last flush to now.

    Args:
        series: How steps fade.
        now: The completed updates at the start.
    """

    def __init__(self, series: Series, now: int) -> None:
        """See the class."""
        self.series = series
        slowest = max(series.ratio, series.eps_ratio)
        self.window = HISTORY_LIMIT
        if slowest < 1.0:
            faded = math.log(_FADED) / math.log(slowest) if slowest > 0.0 else 1.0
            self.window = min(math.ceil(faded), HISTORY_LIMIT)
        distances = np.arange(self.window, 0, -1, dtype=np.float64)
        self._ratios = series.ratio**distances
        self._eps_ratios = series.eps_ratio**distances
        self.restart(now)

    def restart(self, now: int) -> None:
        """Forgets the past: no row is older than ``now``."""
        self.start = now
        self.now = now
        #: float64 ``[3, capacity]``: log2 of P from the start, C, E; see ``csrc/catch_up.h``.
        self.values = torch.zeros(3, 256, dtype=torch.float64, device="cpu")

    def __len__(self) -> int:
        """The updates since the start."""
        return self.now - self.start

    def append(self, learning_rate: float, weight_decay: float, step_gain: float) -> None:
        """Adds one update.

        Args:
            learning_rate: Of this update.
            weight_decay: Of this update, decoupled.
            step_gain: A factor of the step: ``momentum`` with Nesterov, else 1.
        """
        self.now += 1
        if len(self) >= self.values.shape[1]:
            self.values = torch.cat([self.values, torch.zeros_like(self.values)], dim=1)
        log2_keep, steps, eps = self.values.numpy()
        last = len(self)
        first = max(0, last - self.window)
        keep = 1.0 - learning_rate * weight_decay
        bias, eps_gain = self.series.gains(self.now)
        step = learning_rate * step_gain * bias
        steps[first:last] *= keep
        steps[first:last] += step * self._ratios[self.window - (last - first) :]
        eps[first:last] *= keep
        eps[first:last] += step * eps_gain * self._eps_ratios[self.window - (last - first) :]
        log2_keep[last] = log2_keep[last - 1] + math.log2(keep)


class SleepingRows:
    """Which update each row is current to, and the history since.

    Args:
        rows: The number of rows of all tables.
        series: How steps fade.
        now: The completed updates; all rows are current.
        device: The tables'.
    """

    def __init__(self, rows: int, series: Series, now: int, device: torch.device) -> None:
        """See the class."""
        self.row_steps: Tensor = torch.full((rows,), now, dtype=ROW_STEPS.dtype, device=device)
        self.history = History(series, now)

    def restart(self, now: int, series: Series | None = None) -> None:
        """Declares all rows current."""
        self.row_steps.fill_(now)
        if series is not None and series != self.history.series:
            self.history = History(series, now)
        else:
            self.history.restart(now)
