"""Quality is that of all examples together, however they were spread over batches and ranks."""

import math

import pytest
import torch

from tests.distributed.ranks import run_on_ranks
from torchrec_ext.command.ranks import Ranks
from torchrec_ext.train.metrics import Quality, QualityMeter


def _measure(parts: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> Quality:
    """Measure on this rank's part of the batches, together with the other ranks."""
    ranks = Ranks(torch.distributed.get_rank(), len(parts), len(parts))
    meter = QualityMeter(ranks)
    for logits, labels in parts[ranks.rank]:
        meter.add(logits, labels)
    return meter.compute()


def _reference(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """AUC by counting pairs, and mean negative log-likelihood, in float64."""
    scores = logits.double()
    positive, negative = scores[labels == 1], scores[labels == 0]
    difference = positive[:, None] - negative[None, :]
    auc = ((difference > 0).double() + 0.5 * (difference == 0).double()).mean()
    likelihood = torch.where(labels == 1, scores.sigmoid(), 1 - scores.sigmoid())
    return float(auc), float(-likelihood.log().mean())


def test_two_ranks_with_unequal_parts_measure_what_one_would() -> None:
    labels = (torch.rand(90) < 0.4).float()
    # Rounded, so that scores tie.
    logits = ((torch.randn(90) + labels) * 4).round() / 4
    batches = [(logits[:40], labels[:40]), (logits[40:50], labels[40:50])]
    rest = [(logits[50:], labels[50:]), (logits[:0], labels[:0])]
    auc, log_loss = _reference(logits, labels)
    results = run_on_ranks(2, _measure, [batches, rest])
    assert results[0] == results[1]
    assert results[0].auc == pytest.approx(auc, abs=1e-6)
    assert results[0].log_loss == pytest.approx(log_loss, abs=1e-6)
    assert results[0].positive_share == float(labels.double().mean())
    assert results[0].examples == 90


def test_a_rank_without_examples_changes_nothing() -> None:
    logits, labels = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 0.0])
    empty = [(logits[:0], labels[:0])]
    result = run_on_ranks(2, _measure, [[(logits, labels)], empty])[1]
    auc, log_loss = _reference(logits, labels)
    assert result.auc == auc == 1.0
    assert result.log_loss == pytest.approx(log_loss, abs=1e-6)


def test_auc_of_equal_labels_is_undefined() -> None:
    result = run_on_ranks(1, _measure, [[(torch.zeros(3), torch.ones(3))]])[0]
    assert result.auc is None
    assert result.log_loss == pytest.approx(math.log(2))
    assert result.positive_share == 1.0
