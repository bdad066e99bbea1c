"""Weights of sharded models in unsharded ones, and these quantised."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as StockSharder
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantCollection

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.inference import gather_weights

from ..hyperparameters import HYPERPARAMETERS
from . import models, replicas
from .ranks import run_on_ranks

ADAM = HYPERPARAMETERS[OptimType.ADAM]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FTRL": (OptimType.FTRL, HYPERPARAMETERS[OptimType.FTRL]),
    "ADAM": (OptimType.ADAM, ADAM),
    "ADAM dense": (OptimType.ADAM, {**ADAM, "sparse_mode": "dense"}),
    "stock EXACT_ADAGRAD": (EmbOptimType.EXACT_ADAGRAD, {"learning_rate": 0.1}),
}
RUNS = [
    ("FTRL", "table_wise", True),
    ("FTRL", "row_wise", True),
    ("FTRL", "column_wise", False),
    ("ADAM", "column_wise", True),
    ("ADAM", "row_wise", False),
    ("ADAM dense", "row_wise", True),
    ("stock EXACT_ADAGRAD", "column_wise", True),
]


class _Lookups(models.Model):
    """The embeddings themselves: TorchRec quantises collections, not their surroundings."""

    def forward(self, features: Any) -> dict[str, Tensor]:
        if self.pooled:
            return self.ebc(features).to_dict()
        return {name: jagged.values() for name, jagged in self.ec(features).items()}


def _tables(pooled: bool) -> tuple[models.Table, ...]:
    return models.BAG_TABLES if pooled else models.SEQUENCE_TABLES


def _trained(case: str, sharding_type: str, pooled: bool) -> models.DistributedModelParallel:
    optimizer, hyperparameters = OPTIMIZERS[case]
    params = {"optimizer": optimizer, **hyperparameters}
    sharders: list[Any] = [StockSharder(params)]
    if isinstance(optimizer, OptimType):
        sharders = [EmbeddingBagCollectionSharder(params), EmbeddingCollectionSharder(params)]
    model = models.Model(_tables(pooled), pooled)
    plan = models.plan_for(model, sharders, sharding_type, _tables(pooled))
    sharded = models.shard(model, sharders, plan)
    replicas.write_tables(sharded, models.initial_weights(_tables(pooled)))
    for batch in models.batches(4, _tables(pooled)):
        sharded(batch.of_rank(dist.get_rank(), dist.get_world_size())).backward()
    return sharded


def _gather(case: str, sharding_type: str, pooled: bool, all_ranks: bool) -> dict[str, Any]:
    sharded = _trained(case, sharding_type, pooled)
    gathered = gather_weights(sharded, all_ranks=all_ranks)
    return {"gathered": gathered, "shards": _shards(sharded)}


def _shards(model: models.DistributedModelParallel) -> dict[str, list[Any]]:
    """This rank's shards, every row up to date: for ``assemble``."""
    shards: dict[str, list[Any]] = {}
    for shard in replicas.shards_of(model):
        shards.setdefault(shard.table, []).append((shard.offsets, shard.weight.clone()))
    return shards


def _unsharded(weights: dict[str, Tensor], pooled: bool) -> _Lookups:
    model = _Lookups(_tables(pooled), pooled)
    model.load_state_dict(weights)
    return model.eval()


def _quantized(model: torch.nn.Module, dtype: torch.dtype) -> Any:
    return quantize_embeddings(
        model,
        dtype=dtype,
        inplace=False,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantCollection},
    )


@pytest.mark.parametrize("case, sharding_type, pooled", RUNS)
def test_an_unsharded_model_with_the_gathered_weights_quantises(
    case, sharding_type, pooled
) -> None:
    results = run_on_ranks(2, _gather, case, sharding_type, pooled, False)
    assert results[1]["gathered"] == {}
    whole = models.assemble([each["shards"] for each in results])
    model = _unsharded(results[0]["gathered"], pooled)
    expected = _Lookups(_tables(pooled), pooled).eval()
    for name, parameter in expected.named_parameters():
        assert torch.equal(results[0]["gathered"][name], whole[name.split(".")[-2]])
        parameter.data.copy_(whole[name.split(".")[-2]])
    batch = models.batches(1, _tables(pooled))[0].of_rank(0, 1)
    for dtype in (torch.qint8, torch.float16):
        found, stock = _quantized(model, dtype), _quantized(expected, dtype)
        assert type(found.ebc if pooled else found.ec) in (QuantBagCollection, QuantCollection)
        outputs, exact = found(batch), model(batch)
        assert outputs.keys() == exact.keys()
        for name, value in stock(batch).items():
            assert torch.equal(outputs[name], value)
            assert torch.allclose(outputs[name].float(), exact[name], atol=0.05)
    assert any(weight.abs().max() > 0.05 for weight in whole.values())


def test_every_rank_gets_the_weights_on_demand() -> None:
    left, right = run_on_ranks(2, _gather, "FTRL", "row_wise", True, True)
    assert left["gathered"].keys() == right["gathered"].keys()
    whole = models.assemble([left["shards"], right["shards"]])
    for name, weight in left["gathered"].items():
        assert torch.equal(weight, right["gathered"][name])
        assert torch.equal(weight, whole[name.split(".")[-2]])


def _gather_from_replicas(
    sharding_type: str,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": OptimType.FTRL, **HYPERPARAMETERS[OptimType.FTRL]}
    )
    model = replicas.replicate(models.Model(), [sharder], sharding_type)
    model(models.batches(1)[0].of_rank(dist.get_rank(), 4)).backward()
    model.sync()
    return gather_weights(model), gather_weights(model.module.ebc, all_ranks=True), _shards(model)


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise"])
def test_replicas_are_gathered_once(sharding_type) -> None:
    results = run_on_ranks(4, _gather_from_replicas, sharding_type)
    whole = models.assemble([shards for _, _, shards in results])
    for name, weight in results[0][0].items():
        assert torch.equal(weight, whole[name.split(".")[-2]])
    assert len(results[0][0]) == 3
    for of_rank_0, of_module, _ in results[1:]:
        assert of_rank_0 == {}
        assert all(
            torch.equal(of_module[f"embedding_bags.{n}.weight"], w) for n, w in whole.items()
        )


def _part_of_the_ranks() -> str:
    sharded = _trained("FTRL", "row_wise", True)
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        return ""
    try:
        gather_weights(sharded, process_group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_group_without_some_shards_is_an_error() -> None:
    message = run_on_ranks(2, _part_of_the_ranks)[0]
    assert "t0.weight has shape (23, 8), but the ranks of the group have only" in message


def _quantize_sharded(case: str, pooled: bool, function: str) -> tuple[str, str]:
    """The error, and the type of the collection afterwards."""
    sharded = _trained(case, "table_wise", pooled)
    message = ""
    try:
        if function == "quantize_inference_model":
            quantize_inference_model(sharded)
        else:
            quantize_embeddings(sharded, dtype=torch.qint8, inplace=True)
    except ValueError as error:
        message = str(error)
    collection = sharded.module.ebc if pooled else sharded.module.ec
    return message, type(collection).__name__


@pytest.mark.parametrize("function", ["quantize_embeddings", "quantize_inference_model"])
@pytest.mark.parametrize("case, pooled", [("FTRL", True), ("ADAM", False)])
def test_a_sharded_model_is_not_quantised_and_says_so(case, pooled, function) -> None:
    for message, collection in run_on_ranks(2, _quantize_sharded, case, pooled, function):
        assert message.startswith("tables ['t0', 't1', 't2'] are sharded: quantize_embeddings")
        assert "torchrec_ext.inference.gather_weights(model)" in message
        assert collection.startswith("Sharded")


@pytest.mark.parametrize("installed", [False, True])
def test_fbgemms_tables_in_a_sharded_model_are_left_in_silence_as_by_torchrec(installed) -> None:
    if installed:
        torchrec_ext.install()
    arguments = ("stock EXACT_ADAGRAD", True, "quantize_embeddings")
    for message, collection in run_on_ranks(2, _quantize_sharded, *arguments):
        assert (message, collection) == ("", "ShardedEmbeddingBagCollection")


def test_other_quantisations_pass_through_the_hook() -> None:
    torchrec_ext.install()
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    quantized = torch.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)
    assert type(quantized[0]) is not torch.nn.Linear
    model = copy.deepcopy(models.Model())
    assert type(_quantized(model, torch.qint8).ebc) is QuantBagCollection
