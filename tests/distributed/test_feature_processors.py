"""Position-weighted bags: TorchRec's feature processor before tables with our optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import embeddingbag
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from ..hyperparameters import HYPERPARAMETERS
from . import models
from .ranks import run_on_ranks
from .updates import update_of

LONGEST = 4
TABLES = models.SUM_TABLES[:2]  # FBGEMM cannot have a shard without rows
FEATURES = [feature for table in TABLES for feature in table.features]
COLUMNS: dict[str, tuple[Any, OptimType]] = {
    "stock": (EmbOptimType.EXACT_ADAGRAD, OptimType.EXACT_ADAGRAD),
    "FTRL": (OptimType.FTRL, OptimType.FTRL),
    "ADAM": (OptimType.ADAM, OptimType.ADAM),
}
SHARDING_TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
)


def _position_weights() -> dict[str, torch.Tensor]:
    return {f: 0.5 + 0.25 * torch.arange(LONGEST) + n for n, f in enumerate(FEATURES)}


def _steps(count: int) -> list[models.Lookups]:
    """Batches whose per-sample weights are the position weights, for the reference."""
    values = _position_weights()
    steps = []
    for step in models.batches(count, TABLES):
        weights = {f: [values[f][: len(bag)].tolist() for bag in step.rows[f]] for f in step.rows}
        steps.append(dataclasses.replace(step, weights=weights))
    return steps


def _train(column: str, sharding_type: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """This rank's shards of weights, and the gradients of the position weights in one batch."""
    optimizer = COLUMNS[column][0]
    fused_params = {"optimizer": optimizer, **HYPERPARAMETERS[COLUMNS[column][1]]}
    bags = (
        embeddingbag.EmbeddingBagCollectionSharder
        if column == "stock"
        else EmbeddingBagCollectionSharder
    )
    sharders = [FeatureProcessedEmbeddingBagCollectionSharder(bags(fused_params))]
    model = models.Model(TABLES, weighted=True)
    processor = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, LONGEST))
    for name, weight in _position_weights().items():
        processor.position_weights[name].data.copy_(weight)
    model.ebc = FeatureProcessedEmbeddingBagCollection(model.ebc, processor)
    plan = models.plan_for(model, sharders, sharding_type, TABLES)
    for sharding in plan.plan["ebc"].values():
        sharding.compute_kernel = "fused"
    sharded = models.shard(model, sharders, plan)
    state = {k: v for k, v in sharded.state_dict().items() if "embedding_bags" in k}
    for name, table in state.items():
        for part in table.local_shards():
            part.tensor.copy_(
                models.initial_weights(TABLES)[name.split(".")[-2]][models._region(part)]
            )
    gradients: dict[str, torch.Tensor] = {}
    for step in _steps(5):
        sharded(step.of_rank(torch.distributed.get_rank(), 2)).backward()
        if not gradients:
            for name, parameter in sharded.named_parameters():
                if "position_weights" in name:
                    gradients[name.split(".")[-1]] = parameter.grad.clone()
    return {name.split(".")[-2]: models._parts(table) for name, table in state.items()}, gradients


def _expected_gradients() -> dict[str, torch.Tensor]:
    (step,) = _steps(1)
    leaves = {f: w.double().requires_grad_() for f, w in _position_weights().items()}
    loss = torch.zeros((), dtype=torch.float64)
    for table in TABLES:
        weight = models.initial_weights(TABLES)[table.name].double()
        for feature in table.features:
            for bag in step.rows[feature]:
                rows = weight[bag] * leaves[feature][: len(bag)].unsqueeze(1)
                loss = loss + models.loss_of(rows.sum(0))
    (loss / models.BATCH_SIZE).backward()
    return {feature: leaf.grad for feature, leaf in leaves.items()}


@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
@pytest.mark.parametrize("column", COLUMNS)
def test_position_weighted_bags_train_as_the_reference(column, sharding_type):
    answers = run_on_ranks(2, _train, column, sharding_type)
    found = models.assemble([weights for weights, _ in answers])
    optimizer = COLUMNS[column][1]
    update = update_of(optimizer, **HYPERPARAMETERS[optimizer])
    updates = dict.fromkeys((table.name for table in TABLES), update)
    expected = models.train_unsharded(_steps(5), TABLES, updates, weighted=True)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)
    gradients = _expected_gradients()
    for _, own in answers:
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name].double(), gradient, rtol=1e-5, atol=1e-6)
