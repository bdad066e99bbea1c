"""One optimizer per table: classes, dicts and what TorchRec makes of them."""

import copy
import warnings

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import apply_optimizer_in_backward

from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.optimizers import HyperparameterError

from . import models
from .ranks import run_on_ranks
from .updates import update_of

SHARDERS = {
    (True, "ours"): EmbeddingBagCollectionSharder,
    (False, "ours"): EmbeddingCollectionSharder,
    (True, "stock"): embeddingbag.EmbeddingBagCollectionSharder,
    (False, "stock"): embedding.EmbeddingCollectionSharder,
}


def parameters_of(model: models.Model, table: str) -> list[torch.nn.Parameter]:
    tables = model.ebc.embedding_bags if model.pooled else model.ec.embeddings
    return list(tables[table].parameters())


def _described(module) -> tuple[str, dict[str, float]]:
    if hasattr(module, "optim_type"):
        return module.optim_type.name, dict(module.hyperparameters)
    return f"FBGEMM {module.optimizer.name}", {"learning_rate": module.get_learning_rate()}


def shard(model: models.Model, sharder, tables) -> models.DistributedModelParallel:
    return models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise", tables))


def _optimizers(model: models.DistributedModelParallel) -> dict[str, tuple[str, dict]]:
    return {name: _described(m) for name, m in models.modules_by_table(model).items()}


@pytest.mark.parametrize(("pooled", "whose"), SHARDERS)
def test_one_dict_used_for_two_classes_gives_each_table_its_own(pooled, whose):
    def build() -> tuple[dict, dict]:
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        shared = {"lr": 0.25}
        _apply_optimizer_in_backward(optim.FTRL, parameters_of(model, "t0"), shared)
        _apply_optimizer_in_backward(optim.Adagrad, parameters_of(model, "t1"), shared)
        _apply_optimizer_in_backward(optim.RowWiseAdagrad, parameters_of(model, "t2"), shared)
        return _optimizers(shard(model, SHARDERS[pooled, whose](), tables)), shared

    found, shared = run_on_ranks(1, build)[0]
    assert {table: name for table, (name, _) in found.items()} == {
        "t0": "FTRL",
        "t1": "EXACT_ADAGRAD",
        "t2": "EXACT_ROWWISE_ADAGRAD",
    }
    assert all(values["learning_rate"] == 0.25 for _, values in found.values())
    assert shared == {"lr": 0.25}, "the caller's dict is not written to"


@pytest.mark.parametrize("pooled", [True, False])
def test_a_dict_changed_after_apply_changes_nothing(pooled):
    def build() -> dict:
        tables = models.BAG_TABLES[:2] if pooled else models.SEQUENCE_TABLES[:2]
        model = models.Model(tables, pooled)
        keywords = {"lr": 0.25, "l1_reg": 0.5}
        _apply_optimizer_in_backward(optim.FTRL, parameters_of(model, "t0"), keywords)
        keywords["lr"] = 0.75
        _apply_optimizer_in_backward(optim.FTRL, parameters_of(model, "t1"), keywords)
        return _optimizers(shard(model, SHARDERS[pooled, "ours"](), tables))

    found = run_on_ranks(1, build)[0]
    assert found["t0"][1]["learning_rate"] == 0.25
    assert found["t1"][1]["learning_rate"] == 0.75
    assert found["t0"][1]["l1_reg"] == found["t1"][1]["l1_reg"] == 0.5


@pytest.mark.parametrize(("pooled", "whose"), SHARDERS)
def test_a_dict_shared_with_a_class_of_torch_keeps_both(pooled, whose):
    """TorchRec writes its optimizer into the dict of the torch class; ours was copied before."""

    def build() -> dict:
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        shared = {"lr": 0.25}
        _apply_optimizer_in_backward(torch.optim.SGD, parameters_of(model, "t0"), shared)
        _apply_optimizer_in_backward(optim.FTRL, parameters_of(model, "t1"), shared)
        _apply_optimizer_in_backward(torch.optim.Adagrad, parameters_of(model, "t2"), {"lr": 0.5})
        return _optimizers(shard(model, SHARDERS[pooled, whose](), tables))

    found = run_on_ranks(1, build)[0]
    assert {table: name for table, (name, _) in found.items()} == {
        "t0": f"FBGEMM {EmbOptimType.EXACT_SGD.name}",
        "t1": "FTRL",
        "t2": f"FBGEMM {EmbOptimType.EXACT_ADAGRAD.name}",
    }
    rates = {table: values["learning_rate"] for table, (_, values) in found.items()}
    assert rates == pytest.approx({"t0": 0.25, "t1": 0.25, "t2": 0.5})


@pytest.mark.parametrize("pooled", [True, False])
def test_each_table_trains_with_its_own_update(pooled):
    tables = models.SUM_TABLES if pooled else models.SEQUENCE_TABLES
    ftrl = {"learning_rate": 0.2, "l1_reg": 0.1, "ftrl_beta": 0.5}

    def train() -> dict:
        model = models.Model(tables, pooled)
        apply = _apply_optimizer_in_backward
        apply(optim.FTRL, parameters_of(model, "t0"), ftrl)
        apply(optim.SGD, parameters_of(model, "t1"), {"lr": 0.1})
        sharder = SHARDERS[pooled, "ours"](
            {"optimizer": OptimType.EXACT_ADAGRAD, "learning_rate": 0.3, "eps": 1e-4}
        )
        sharded = models.shard(
            model, [sharder], models.plan_for(model, [sharder], "row_wise", tables)
        )
        models.write_weights(sharded, models.initial_weights(tables))
        rank = torch.distributed.get_rank()
        for step in models.batches(10, tables):
            sharded(step.of_rank(rank, 2)).backward()
        return models.read_weights(sharded)

    found = models.assemble(run_on_ranks(2, train))
    updates = {
        "t0": update_of(OptimType.FTRL, **ftrl),
        "t1": update_of(OptimType.EXACT_SGD, learning_rate=0.1),
        "t2": update_of(OptimType.EXACT_ADAGRAD, learning_rate=0.3, eps=1e-4),
    }
    expected = models.train_unsharded(models.batches(10, tables), tables, updates, pooled)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-5)


def test_a_table_with_its_own_optimizer_does_not_inherit_the_sharders_hyperparameters():
    def build() -> dict:
        model = models.Model()
        _apply_optimizer_in_backward(optim.Adagrad, parameters_of(model, "t0"), {"lr": 0.5})
        _apply_optimizer_in_backward(torch.optim.SGD, parameters_of(model, "t1"), {"lr": 0.5})
        fused_params = {
            "optimizer": OptimType.FTRL,
            "lr": 0.125,
            "ftrl_l1_reg": 0.25,
            "initial_accumulator_value": 0.75,
            "gradient_clipping": True,
            "max_gradient": 2.0,
        }
        before = copy.deepcopy(fused_params)
        sharded = shard(model, EmbeddingBagCollectionSharder(fused_params), models.BAG_TABLES)
        assert fused_params == before
        modules = models.modules_by_table(sharded)
        for module in modules.values():
            arguments = module.optimizer_args
            assert (arguments.gradient_clipping, arguments.max_gradient) == (True, 2.0)
        return _optimizers(sharded)

    found = run_on_ranks(1, build)[0]
    assert found["t0"] == (
        "EXACT_ADAGRAD",
        {"learning_rate": 0.5, "eps": 1e-8, "initial_accumulator_value": 0.0},
    )
    assert found["t1"] == ("FBGEMM EXACT_SGD", {"learning_rate": 0.5})
    name, values = found["t2"]
    assert name == "FTRL"
    assert values["learning_rate"] == 0.125
    assert values["l1_reg"] == 0.25
    assert values["initial_accumulator_value"] == 0.75


def test_a_class_of_ours_does_not_inherit_hyperparameters_of_fbgemms_optimizer():
    def build() -> dict:
        model = models.Model()
        _apply_optimizer_in_backward(optim.FTRL, parameters_of(model, "t0"), {"lr": 0.5})
        fused_params = {
            "optimizer": EmbOptimType.EXACT_ADAGRAD,
            "learning_rate": 0.125,
            "eps": 0.25,
            "weight_decay": 0.0,
        }
        sharder = EmbeddingBagCollectionSharder(fused_params)
        return _optimizers(shard(model, sharder, models.BAG_TABLES))

    found = run_on_ranks(1, build)[0]
    assert found["t0"][0] == "FTRL"
    assert found["t0"][1]["learning_rate"] == 0.5
    assert found["t1"][0] == found["t2"][0] == "FBGEMM EXACT_ADAGRAD"


@pytest.mark.parametrize("pooled", [True, False])
def test_a_table_without_an_optimizer_beside_one_of_ours_is_refused(pooled):
    def build() -> None:
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        _apply_optimizer_in_backward(optim.FTRL, parameters_of(model, "t0"), {"lr": 0.5})
        shard(model, SHARDERS[pooled, "ours"](), tables)

    with pytest.raises(HyperparameterError, match=r"tables \['t1', 't2'\]: no optimizer"):
        run_on_ranks(1, build)


def test_two_collections_under_one_sharder_keep_their_optimizers():
    class TwoCollections(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(
                name="same_name", num_embeddings=8, embedding_dim=8, feature_names=["f0"]
            )
            self.first = EmbeddingBagCollection([copy.deepcopy(config)])
            self.second = EmbeddingBagCollection([copy.deepcopy(config)])

    def build() -> list[tuple[str, float]]:
        model = TwoCollections()
        shared = {"lr": 0.25}
        _apply_optimizer_in_backward(optim.FTRL, model.first.parameters(), shared)
        _apply_optimizer_in_backward(optim.SGD, model.second.parameters(), shared)
        sharder = EmbeddingBagCollectionSharder()
        sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], None))
        kernels = [
            kernel
            for collection in (sharded.module.first, sharded.module.second)
            for lookup in collection._lookups
            for kernel in lookup._emb_modules
        ]
        return [(k.emb_module.optim_type.name, k.emb_module.get_learning_rate()) for k in kernels]

    assert run_on_ranks(1, build) == [[("FTRL", 0.25), ("EXACT_SGD", 0.25)]]


def test_a_lone_embedding_bag_gets_the_class_of_its_parameter():
    """TorchRec's sharder of nn.EmbeddingBag reads no class: the hook does."""

    def train(fused_params: dict | None) -> tuple[str, dict, torch.Tensor]:
        torch.manual_seed(0)
        bag = torch.nn.EmbeddingBag(8, 8, mode="sum", include_last_offset=True)
        _apply_optimizer_in_backward(optim.FTRL, bag.parameters(), {"lr": 0.25, "l1_reg": 0.5})
        sharder = embeddingbag.EmbeddingBagSharder(fused_params)
        plan = construct_module_sharding_plan(
            bag,
            {"weight": row_wise(compute_kernel="fused")},
            sharder,
            local_size=2,
            world_size=2,
            device_type="cpu",
        )
        sharded = models.shard(torch.nn.Sequential(bag), [sharder], ShardingPlan({"0": plan}))
        (kernel,) = sharded.module[0]._lookup._emb_modules
        kernel.emb_module.split_embedding_weights()[0].fill_(1.0)
        sharded.module[0](torch.tensor([1, 5]), torch.tensor([0, 2])).sum().backward()
        return *_described(kernel.emb_module), kernel.emb_module.split_embedding_weights()[0][1]

    inherited = {"optimizer": OptimType.EXACT_ADAGRAD, "eps": 0.5}
    for fused_params in (None, inherited):
        for name, values, row in run_on_ranks(2, train, fused_params):
            assert (name, values["learning_rate"], values["l1_reg"]) == ("FTRL", 0.25, 0.5)
            assert row.unique().numel() == 1 and row[0] != 1.0


def test_torchrecs_deprecated_function_takes_the_classes_too():
    def build() -> dict:
        model = models.Model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            apply_optimizer_in_backward(optim.FTRL, model.ebc.parameters(), {"lr": 0.5})
        return _optimizers(shard(model, EmbeddingBagCollectionSharder(), models.BAG_TABLES))

    assert {name for name, _ in run_on_ranks(1, build)[0].values()} == {"FTRL"}


def test_the_parameters_marks_are_what_they_were_after_sharding():
    """Planner and statistics read the class from the parameter, before and after."""

    def build() -> bool:
        model = models.Model()
        _apply_optimizer_in_backward(optim.FTRL, model.ebc.parameters(), {"lr": 0.5})
        parameters = list(model.ebc.parameters())
        shard(model, EmbeddingBagCollectionSharder(), models.BAG_TABLES)
        return all(
            parameter._optimizer_classes == [optim.FTRL]
            and parameter._optimizer_kwargs == [{"lr": 0.5}]
            for parameter in parameters
        )

    assert run_on_ranks(1, build) == [True]


def test_every_optimizer_has_a_class():
    assert set(optim.classes()) == set(OptimType)


@pytest.mark.parametrize("pooled", [True, False])
def test_two_classes_on_one_table_are_refused_by_name(pooled):
    def build() -> None:
        tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
        model = models.Model(tables, pooled)
        _apply_optimizer_in_backward(optim.FTRL, model.parameters(), {"lr": 0.5})
        _apply_optimizer_in_backward(torch.optim.SGD, parameters_of(model, "t1"), {"lr": 0.5})
        shard(model, SHARDERS[pooled, "stock"](), tables)

    with pytest.raises(ValueError, match=r"table 't1'.*FTRL, SGD"):
        run_on_ranks(1, build)
