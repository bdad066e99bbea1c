"""``FusedEmbeddingBagCollection`` with our classes as its optimizer type, alone and sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torchrec import PoolingType
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)

import torchrec_ext
from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import PlanError
from torchrec_ext.optimizers import HyperparameterError
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from . import models
from .ranks import run_on_ranks
from .updates import update_of

FTRL = {"lr": 0.2, "ftrl_beta": 1.0, "l1_reg": 0.1}
COLUMNS: dict[str, tuple[type, dict[str, Any], OptimType, dict[str, Any]]] = {
    "stock": (
        torch.optim.Adagrad,
        {"lr": 0.2, "eps": 1e-6},
        OptimType.EXACT_ADAGRAD,
        {"lr": 0.2, "eps": 1e-6},
    ),
    "FTRL": (optim.FTRL, FTRL, OptimType.FTRL, FTRL),
    "Adam": (
        optim.Adam,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1},
        OptimType.ADAM,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1, "weight_decay_mode": "L2"},
    ),
}
# TorchRec's own module gives tables of other poolings each other's names.
TABLES = models.SUM_TABLES
MEAN_TABLES = (models.Table("t0", 9, 8, ("f0", "f1"), PoolingType.MEAN),)


@pytest.fixture(autouse=True)
def with_hook(without_hook: None) -> None:
    torchrec_ext.install()


def _configs(tables: Any, pooled: bool = True) -> list[Any]:
    configs: list[Any] = []
    for table in tables:
        shape = {"num_embeddings": table.rows, "embedding_dim": table.dim}
        names = {"name": table.name, "feature_names": list(table.features)}
        if pooled:
            configs.append(EmbeddingBagConfig(**shape, **names, pooling=table.pooling))
        else:
            configs.append(EmbeddingConfig(**shape, **names))
    return configs


def _model(column: str, tables: Any = TABLES, weighted: bool = False) -> models.Model:
    model = models.Model(tables, weighted=weighted)
    optimizer, keywords = COLUMNS[column][:2]
    model.ebc = FusedEmbeddingBagCollection(
        _configs(tables), optimizer, keywords, is_weighted=weighted
    )
    for name, weight in model.state_dict().items():
        weight.copy_(models.initial_weights(tables)[name.split(".")[-2]])
    return model


def _expected(column: str, steps: int, tables: Any = TABLES, **options: Any) -> dict:
    update = update_of(COLUMNS[column][2], **COLUMNS[column][3])
    updates = dict.fromkeys((table.name for table in tables), update)
    return models.train_unsharded(models.batches(steps, tables), tables, updates, **options)


def _assert_weights(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name.split(".")[-2]: weight for name, weight in model.state_dict().items()}


@pytest.mark.parametrize(
    ("tables", "weighted"), [(TABLES, False), (TABLES, True), (MEAN_TABLES, False)]
)
@pytest.mark.parametrize("column", COLUMNS)
def test_alone_it_trains_as_the_reference(column, tables, weighted):
    model = _model(column, tables, weighted)
    for step in models.batches(5, tables):
        model(step.of_rank(0, 1, weighted)).backward()
    _assert_weights(_weights(model), _expected(column, 5, tables, weighted=weighted))


def test_torchs_adam_is_not_fbgemms_on_cpu():
    with pytest.raises(AssertionError, match="Optimizer adam is not supported in CPU mode"):
        FusedEmbeddingBagCollection(_configs(TABLES), torch.optim.Adam, {"lr": 0.1})


def test_without_the_hook_torchrec_refuses_our_classes():
    torchrec_ext.uninstall()
    with pytest.raises(ValueError, match="Cannot fuse optimizer_type=.*FTRL"):
        FusedEmbeddingBagCollection(_configs(TABLES), optim.FTRL, FTRL)


def test_a_wrong_hyperparameter_is_refused_by_name():
    for wrong in ({"l1reg": 0.5}, {"l1_reg": -0.5}):
        with pytest.raises(HyperparameterError, match=next(iter(wrong))):
            FusedEmbeddingBagCollection(_configs(TABLES), optim.FTRL, {**FTRL, **wrong})


def test_keywords_of_the_module_pass_through():
    keywords = {**FTRL, "gradient_clipping": True, "max_gradient": 0.5}
    collection = FusedEmbeddingBagCollection(_configs(TABLES), optim.FTRL, keywords)
    assert [m._emb_module._max_gradient for m in collection._emb_modules] == [0.5]
    assert keywords == {**FTRL, "gradient_clipping": True, "max_gradient": 0.5}


def test_fuse_embedding_optimizer_takes_our_classes():
    model = fuse_embedding_optimizer(models.Model(TABLES), optim.FTRL, FTRL, torch.device("cpu"))
    (module,) = (each._emb_module for each in model.ebc._emb_modules)
    assert isinstance(module, TableBatchedEmbeddingBags)
    assert module.hyperparameters["l1_reg"] == FTRL["l1_reg"]


@pytest.mark.parametrize("column", ["FTRL", "Adam"])
def test_training_goes_on_from_saved_states(column):
    steps = models.batches(6, TABLES)
    first, second = _model(column), _model(column)
    for step in steps[:3]:
        first(step.of_rank(0, 1)).backward()
    second.load_state_dict(first.state_dict())
    saved = copy.deepcopy(first.ebc.fused_optimizer().state_dict())
    second.ebc.fused_optimizer().load_state_dict(saved)
    for step in steps[3:]:
        second(step.of_rank(0, 1)).backward()
    _assert_weights(_weights(second), _expected(column, 6))


def test_dense_mode_saves_rows_that_are_up_to_date():
    adam = {"lr": 0.1, "weight_decay": 0.1}
    collections = [
        FusedEmbeddingBagCollection(_configs(TABLES), optim.AdamW, {**adam, "sparse_mode": mode})
        for mode in ("dense", "lazy")
    ]
    states = []
    for collection in collections:
        for row in (0, 1):
            bag = models.Lookups({f: [[]] * 8 for t in TABLES for f in t.features}, {})
            bag.rows["f0"] = [[row], *[[]] * 7]
            features = bag.of_rank(0, 1)
            collection(features).values().sum().backward()
        state = collection.fused_optimizer().state_dict()["state"]["t0.weight"]
        states.append(state["t0.weight.momentum_1"][0, 0])
    assert float(states[0]) == pytest.approx(0.9 * float(states[1]))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_of_the_learning_rate_is_followed():
    model = _model("FTRL")
    optimizer = model.ebc.fused_optimizer()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    (module,) = (each._emb_module for each in model.ebc._emb_modules)
    used = []
    for step in models.batches(3, TABLES):
        model(step.of_rank(0, 1)).backward()
        used.append(module.get_learning_rate())
        scheduler.step()
    assert used == [0.2, 0.1, 0.05]


class _AllTypes(FusedEmbeddingBagCollectionSharder):
    """TorchRec's sharder, with the types that it does not offer on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


@pytest.mark.parametrize(
    "sharding_type",
    ["table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise"],
)
@pytest.mark.parametrize("column", COLUMNS)
def test_sharded_it_trains_as_the_reference(column, sharding_type):
    tables = TABLES[:2]  # FBGEMM cannot have a shard without rows

    def train() -> dict:
        model = _model(column, tables)
        sharders = [_AllTypes()]
        plan = models.plan_for(model, sharders, sharding_type, tables)
        sharded = models.shard(model, sharders, plan)
        models.write_weights(sharded, models.initial_weights(tables))
        for step in models.batches(5, tables):
            sharded(step.of_rank(torch.distributed.get_rank(), 2)).backward()
        return models.read_weights(sharded)

    _assert_weights(models.assemble(run_on_ranks(2, train)), _expected(column, 5, tables))


def test_data_parallel_is_refused():
    def build() -> None:
        model = _model("FTRL")
        sharders = [FusedEmbeddingBagCollectionSharder()]
        models.shard(model, sharders, models.plan_for(model, sharders, "data_parallel"))

    with pytest.raises(PlanError, match="(?s)table 't0'.*'data_parallel'.*torchrec_ext.optim.FTRL"):
        run_on_ranks(1, build)


@pytest.mark.parametrize("column", COLUMNS)
def test_torchrec_has_no_sequences_on_cpu(column):
    message = r"FusedEmbeddingCollection is only supported for device in \[CUDA, meta\]"
    with pytest.raises(AssertionError, match=message):
        FusedEmbeddingCollection(_configs(models.SEQUENCE_TABLES, False), *COLUMNS[column][:2])


def _shard_sequences(column: str) -> None:
    tables = models.SEQUENCE_TABLES
    model = models.Model(tables, pooled=False)
    model.ec = FusedEmbeddingCollection(
        _configs(tables, False), *COLUMNS[column][:2], device=torch.device("meta")
    )
    ours = [isinstance(m._emb_module, TableBatchedEmbeddingBags) for m in model.ec._emb_modules]
    assert ours == [column != "stock"]
    sharders = [FusedEmbeddingCollectionSharder()]
    models.shard(model, sharders, models.plan_for(model, sharders, "row_wise", tables))


@pytest.mark.parametrize("column", COLUMNS)
def test_torchrec_cannot_shard_sequences(column):
    message = "'FusedEmbeddingCollection' object has no attribute 'use_gather_select'"
    with pytest.raises(AttributeError, match=message):
        run_on_ranks(1, _shard_sequences, column)
