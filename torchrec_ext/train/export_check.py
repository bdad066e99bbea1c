"""The exported model beside the whole one, on the held-out examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc

from torchrec_ext.train.data import Batch, RankSlices, Split
from torchrec_ext.train.exported import load_model
from torchrec_ext.train.model import build_model
from torchrec_ext.train.saved_run import SavedRun


@dataclass(frozen=True)
class Comparison:
    """How the two models differ.

    Attributes:
        examples: Number of examples.
        whole_auc: Of the whole model; None if all labels are equal, where it is undefined.
        pruned_auc: Of the model without zero rows.
        embedding_difference: The largest difference of pooled embeddings.
        logit_difference: The largest difference of logits.
        equal: Whether all of them are equal.
    """

    examples: int
    whole_auc: float | None
    pruned_auc: float | None
    embedding_difference: float
    logit_difference: float
    equal: bool


@torch.no_grad()
def compare(run: SavedRun, folder: Path, split: Split) -> Comparison:
    """Compare the outputs of both models.

    Args:
        run: The checkpoint of the whole model.
        folder: What was written of it.
        split: The run's data.
    """
    whole = build_model(run.config.model, split.train)
    state = {table.key.removeprefix("model."): run.read_table(table) for table in run.tables}
    whole.load_state_dict({**state, **run.read_parameters()}, assign=True)
    pruned = load_model(folder, run.config.model, split.train)
    collections = sorted({table.collection for table in run.tables})
    embedding_difference, equal = 0.0, True
    outputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for batch in RankSlices(run.config.train.batch_size, 0, 1).evaluation(split.held_out):
        for collection in collections:
            pair = [_pooled(model, collection, batch) for model in (whole, pruned)]
            equal &= torch.equal(*pair)
            embedding_difference = max(embedding_difference, _difference(*pair))
        logits = [model(batch.sparse, batch.dense)[: batch.count] for model in (whole, pruned)]
        outputs.append((logits[0], logits[1], batch.labels[: batch.count]))
    whole_logits, pruned_logits, labels = (torch.cat(part) for part in zip(*outputs, strict=True))
    return Comparison(
        len(labels),
        _auc(whole_logits, labels),
        _auc(pruned_logits, labels),
        embedding_difference,
        _difference(whole_logits, pruned_logits),
        equal and torch.equal(whole_logits, pruned_logits),
    )


def _pooled(model: nn.Module, collection: str, batch: Batch) -> torch.Tensor:
    return model.get_submodule(collection)(batch.sparse).values()


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


def _auc(logits: torch.Tensor, labels: torch.Tensor) -> float | None:
    if not 0 < int(labels.sum()) < len(labels):
        return None
    return float(binary_auroc(torch.sigmoid(logits), labels.int()))
