"""TorchRec's training pipelines on the CPU: the plain loop's bits, or the error that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as StockSharder
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from ..hyperparameters import HYPERPARAMETERS
from . import models, replicas
from .ranks import run_on_ranks

STEPS = 5
ADAM = HYPERPARAMETERS[OptimType.ADAM]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FTRL": (OptimType.FTRL, HYPERPARAMETERS[OptimType.FTRL]),
    "ADAM": (OptimType.ADAM, ADAM),
    "ADAM dense": (OptimType.ADAM, {**ADAM, "sparse_mode": "dense"}),
    "stock EXACT_ADAGRAD": (EmbOptimType.EXACT_ADAGRAD, {"learning_rate": 0.1}),
}
PIPELINES: dict[str, Callable[..., Any]] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
}


class _Over(torch.nn.Module):
    """The dense part; a module of its own, because pipelines trace what surrounds the tables."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 1)

    def forward(self, embeddings: KeyedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = self.linear(embeddings.values()).squeeze(1)
        return (prediction - 1.0).square().mean(), prediction.detach()


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = models.Model().ebc
        self.pooled = True
        self.over = _Over(sum(table.dim * len(table.features) for table in models.BAG_TABLES))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.over.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.over(self.ebc(features))


def sharded_model(
    optimizer: Any, hyperparameters: dict[str, Any]
) -> models.DistributedModelParallel:
    ours = isinstance(optimizer, OptimType)
    sharder = (EmbeddingBagCollectionSharder if ours else StockSharder)(
        {"optimizer": optimizer, **hyperparameters}
    )
    model = _Model()
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
    replicas.write_tables(sharded, models.initial_weights())
    return sharded


def _train(case: str, pipeline: str | None, scheduled: bool) -> dict[str, Any]:
    """Trains with a pipeline or (None) the plain loop."""
    sharded = sharded_model(*OPTIMIZERS[case])
    dense = KeyedOptimizerWrapper(
        dict(sharded.module.over.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.05)
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6) if scheduled else None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = iter([batch.of_rank(rank, ranks) for batch in models.batches(STEPS)])
    runner = PIPELINES[pipeline](sharded, optimizer, torch.device("cpu")) if pipeline else None
    predictions = []
    for _ in range(STEPS):
        if runner is not None:
            predictions.append(runner.progress(batches))
        else:
            optimizer.zero_grad()
            loss, prediction = sharded(next(batches))
            loss.backward()
            optimizer.step()
            predictions.append(prediction)
        if schedule is not None:
            schedule.step()
    if runner is not None:
        with pytest.raises(StopIteration):
            runner.progress(batches)
    return {
        "predictions": predictions,
        "tables": replicas.copies_of(sharded),
        "dense": [p.detach().clone() for p in sharded.module.over.parameters()],
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_pipeline_trains_with_the_plain_loops_bits(case, pipeline, scheduled) -> None:
    plain = run_on_ranks(2, _train, case, None, scheduled)
    piped = run_on_ranks(2, _train, case, pipeline, scheduled)
    for expected, found in zip(plain, piped, strict=True):
        assert expected["rates"] == found["rates"]
        for key in ("predictions", "dense"):
            assert all(map(torch.equal, expected[key], found[key]))
        assert expected["tables"].keys() == found["tables"].keys()
        for place, tensors in expected["tables"].items():
            assert all(map(torch.equal, tensors, found["tables"][place]))
    assert not torch.equal(piped[0]["predictions"][0], piped[0]["predictions"][-1])


def _refused(case: str, pipeline: str) -> tuple[str, bool]:
    """The error, and whether weights and states kept their bits."""
    sharded = sharded_model(*OPTIMIZERS[case])
    before = replicas.copies_of(sharded)
    batches = iter([batch.of_rank(0, 1) for batch in models.batches(STEPS)])
    message = ""
    try:
        runner = REFUSED[pipeline](sharded, sharded.fused_optimizer, torch.device("cpu"))
        runner.progress(batches)
    except Exception as error:  # noqa: BLE001  (whatever TorchRec raises)
        message = f"{type(error).__name__}: {error}"
    after = replicas.copies_of(sharded)
    return message, all(all(map(torch.equal, before[place], after[place])) for place in before)


REFUSED = {"prefetch": PrefetchTrainPipelineSparseDist, "semi_sync": TrainPipelineSemiSync}
MESSAGES = {
    "prefetch": "AssertionError: Invalid PrefetchPipelinedForward usage, please do not directly "
    "call model.forward()",
    "semi_sync": "RuntimeError: unknown parameter type",
}


@pytest.mark.parametrize("pipeline", REFUSED)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_pipelines_that_need_a_device_say_so_and_train_nothing(case, pipeline) -> None:
    ((message, kept),) = run_on_ranks(1, _refused, case, pipeline)
    assert MESSAGES[pipeline] == message
    assert kept
