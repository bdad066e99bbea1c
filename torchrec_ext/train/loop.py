"""The training loop: the same steps on every rank, each on its slice of the global batch.

The loss is the mean over the global batch: every rank takes the mean over its slice, slices are
equal, and TorchRec divides gradients by the number of ranks. A fused optimizer therefore sees
gradients that do not depend on how many ranks there are, and so does FTRL's ``l1_reg``.

What ``l1_reg`` means follows from the mean. In a batch of B an example adds 1/B of its own
gradient, and the mean over the D columns of a wide row another 1/D. FTRL gives the same weights
when gradients, ``l1_reg``, ``l2_reg`` and ``ftrl_beta`` are all multiplied by one number and the
initial accumulator by its square. So these parameters act like ones B * D times as large in a
one-column model trained on the sum of the losses (the initial accumulator like one (B * D)^2 times
as large). Halve them when you double the batch size.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from torchrec_ext.command.errors import AgreedError, UserError
from torchrec_ext.command.ranks import Ranks, StopRequest
from torchrec_ext.train.checkpoint import Checkpoints, Progress, restore
from torchrec_ext.train.config import Config, TrainConfig
from torchrec_ext.train.data import Batch, RankSlices, Split
from torchrec_ext.train.distribute import Distributed
from torchrec_ext.train.history import CountedZeros, Evaluation, History
from torchrec_ext.train.metrics import QualityMeter
from torchrec_ext.train.tables import WIDE, TouchedRows, ZeroCount, count_zeros, total_of

LOGGER = logging.getLogger(__name__)
# Weight of the past in the loss that the progress bar shows.
LOSS_DECAY = 0.95


class Trainer:
    """Trains and evaluates one model.

    Args:
        config: The run's configuration.
        split: The examples.
        distributed: The sharded model.
        ranks: All ranks, each of which makes the same calls.
        stop: Asked after every step.
        checkpoints: Where to save; None for nowhere.

    Raises:
        UserError: If the global batch cannot be cut into equal slices, or is larger than the
            training data.
    """

    def __init__(
        self,
        config: Config,
        split: Split,
        distributed: Distributed,
        ranks: Ranks,
        stop: StopRequest,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        check_batch_size(config.train.batch_size, len(split.train), ranks.world_size)
        self.history = History()
        self._config = config
        self._split = split
        self._distributed = distributed
        self._ranks = ranks
        self._stop = stop
        self._checkpoints = checkpoints
        self._slices = RankSlices(config.train.batch_size, ranks.rank, ranks.world_size)
        self._touched = TouchedRows(split.train.rows())

    def resume(self, folder: Path, saved: Progress) -> None:
        """Go on from a checkpoint in ``run``; see ``checkpoint.restore``."""
        self.history = restore(folder, saved, self._distributed, self._touched, self._ranks)

    def run(self) -> History:
        """Train for the configured epochs or steps, or until told to stop.

        Raises:
            UserError: On every rank, if the loss stops being a finite number.
        """
        train = self._config.train
        epoch_steps = len(self._split.train) // train.batch_size
        steps = total_steps(train, len(self._split.train))
        # A checkpoint is written before the evaluation that may follow its step: after the last
        # step of an epoch its evaluation is still to come.
        first_epoch = max(len(self.history.losses) - 1, 0) // epoch_steps
        with self._progress(steps * train.batch_size) as progress:
            for epoch in range(first_epoch, -(-steps // epoch_steps)):
                self._epoch(epoch, steps, progress)
                self._evaluate()
                if self._stop.signal is not None:
                    self._save()
                    break
        self.history.zeros = self.count_zeros()
        return self.history

    def count_zeros(self) -> dict[str, ZeroCount]:
        """Count the exactly-zero weights of every table as it is now."""
        return count_zeros(self._distributed.model, self.touched(), self._ranks)

    def touched(self) -> dict[str, torch.Tensor]:
        """Give ``[rows]`` bool by feature: whether the row occurred in training, on any rank."""
        return self._touched.on_any_rank(self._ranks)

    def _epoch(self, epoch: int, steps: int, progress: tqdm) -> None:
        """Train for the rest of an epoch, but not beyond ``steps`` in all."""
        train, examples = self._config.train, self._split.train
        done = len(self.history.losses)
        first = done - epoch * (len(examples) // train.batch_size)
        self._distributed.model.train()
        # Far apart, so that neighbouring seeds share no epoch's order.
        seed = self._config.seed * 1_000_003 + epoch
        start = time.perf_counter()
        smooth = math.nan
        batches = self._slices.training(examples, seed, train.shuffle, first)
        for batch in islice(batches, steps - done):
            loss = self._step(batch)
            smooth = loss if math.isnan(smooth) else LOSS_DECAY * smooth + (1 - LOSS_DECAY) * loss
            progress.set_postfix(loss=f"{smooth:.4f}", **self._zeros_shown(), refresh=False)
            progress.update(train.batch_size)
            self.history.seconds += time.perf_counter() - start
            self._count_zeros_if_due()
            if self._due(steps):
                self._save()
            if self._stop.signal is not None:
                break
            start = time.perf_counter()

    def _count_zeros_if_due(self) -> None:
        """Count zeros between evaluations where the configuration asks for it."""
        every, step = self._config.train.zeros_every_steps, len(self.history.losses)
        if every is not None and step % every == 0:
            self.history.counted.append(CountedZeros(step, self.count_zeros()))

    def _zeros_shown(self) -> dict[str, str]:
        """Give the newest share of zeros among touched wide weights for the progress bar."""
        counts = [each[-1] for each in (self.history.counted, self.history.evaluations) if each]
        if not counts:
            return {}
        newest = max(counts, key=lambda count: count.step)
        return {"zeros": f"{total_of(newest.zeros, WIDE).touched_share:.1%}"}

    def _due(self, steps: int) -> bool:
        """Whether to save after this step, which the last of a run always asks for."""
        done = len(self.history.losses)
        return self._checkpoints is not None and (done == steps or self._checkpoints.due(done))

    def _save(self) -> None:
        if self._checkpoints is not None and self.history.losses:
            self._checkpoints.save(self.history, self._touched)

    def _step(self, batch: Batch) -> float:
        """Train on this rank's slice of a global batch and give the global batch's mean loss."""
        model, optimizer = self._distributed.model, self._distributed.optimizer
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch.sparse, batch.dense), batch.labels)
        loss.backward()
        optimizer.step()
        for feature in batch.sparse.keys():  # noqa: SIM118  a KeyedJaggedTensor is no mapping
            self._touched.add(feature, batch.sparse[feature].values())
        # One collective for both: the loss of all ranks, and whether any was told to stop.
        total, signals = self._ranks.sum(loss.item(), float(self._stop.signal or 0))
        self._stop.settle(signals)
        mean = total / self._ranks.world_size
        self.history.losses.append(mean)
        if not math.isfinite(mean):
            raise AgreedError(  # every rank has the same mean
                f"the loss became {mean} in step {len(self.history.losses)}; lower the learning "
                "rates of optimizer, deep_optimizer or dense_optimizer"
            )
        return mean

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Evaluate on the held-out examples, unless told to stop before or meanwhile."""
        model, meter = self._distributed.model, QualityMeter(self._ranks)
        model.eval()
        for batch in self._slices.evaluation(self._split.held_out):
            if self._stop.agreed(self._ranks):
                return
            logits = model(batch.sparse, batch.dense)
            meter.add(logits[: batch.count], batch.labels[: batch.count])
        quality = meter.compute()
        step = len(self.history.losses)
        self.history.evaluations.append(Evaluation(step, quality, self.count_zeros()))
        LOGGER.info(
            "step %d: %s AUC %s, log loss %.4f",
            step,
            self._config.data.evaluate_on,
            "undefined" if quality.auc is None else f"{quality.auc:.4f}",
            quality.log_loss,
        )

    def _progress(self, examples: int) -> tqdm:
        """Make the bar of rank 0; in a log file it adds a line every few seconds only."""
        return tqdm(
            total=examples,
            initial=len(self.history.losses) * self._config.train.batch_size,
            desc="train",
            unit=" examples",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 5.0,
            disable=not self._ranks.first,
        )


def total_steps(train: TrainConfig, examples: int) -> int:
    """Give the steps of a whole run on this many training examples."""
    steps = train.epochs * (examples // train.batch_size)
    return steps if train.max_steps is None else min(steps, train.max_steps)


def check_batch_size(batch_size: int, examples: int, world_size: int) -> None:
    """Check that global batches exist and can be cut into equal slices.

    Raises:
        UserError: Names ``train.batch_size`` and what it conflicts with.
    """
    if batch_size % world_size != 0:
        raise UserError(
            f"train.batch_size {batch_size} is not a multiple of the {world_size} ranks that share "
            "each batch"
        )
    if batch_size > examples:
        raise UserError(f"train.batch_size {batch_size} exceeds the {examples} training examples")
