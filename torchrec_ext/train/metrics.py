"""Quality on held-out examples, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from torchrec_ext.command.ranks import Ranks


@dataclass(frozen=True)
class Quality:
    """How well logits rank and predict labels.

    Attributes:
        auc: Area under the ROC curve; None if all labels are equal, where it is undefined.
        log_loss: Mean binary cross-entropy in nats.
        positive_share: Share of label 1.
        examples: Number of examples.
    """

    auc: float | None
    log_loss: float
    positive_share: float
    examples: int


class QualityMeter:
    """Collects logits and labels batch by batch.

    Args:
        ranks: The ranks whose batches are combined in the end.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # torchmetrics' own gathering of unequal sizes relies on indexing that torch deprecated.
        self._auc = BinaryAUROC(thresholds=None, dist_sync_fn=ranks.gather)
        # float64: a float32 sum of losses loses digits on long evaluations.
        self._log_loss = MeanMetric(dist_sync_fn=ranks.gather).set_dtype(torch.float64)
        self._positives = 0
        self._examples = 0

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch, which may be empty.

        Args:
            logits: ``[batch]`` float32.
            labels: ``[batch]`` float32, 0 or 1.
        """
        self._auc.update(torch.sigmoid(logits), labels.int())
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        self._log_loss.update(losses)
        self._positives += int(labels.sum())
        self._examples += labels.numel()

    def compute(self) -> Quality:
        """Combine the batches of all ranks, each of which must call this."""
        positives, examples = self._ranks.sum(self._positives, self._examples)
        auc = float(self._auc.compute()) if 0 < positives < examples else None
        return Quality(auc, float(self._log_loss.compute()), positives / examples, int(examples))
