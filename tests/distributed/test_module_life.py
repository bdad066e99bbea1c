"""Sharded modules beside training: copies of the unsharded model, meta, initial weights, casts."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as StockSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.distributed.table_optimizers import applied_optimizer

from . import models, replicas
from .ranks import run_on_ranks
from .test_pipelines import OPTIMIZERS, sharded_model

OURS = pytest.mark.parametrize("case", ["FTRL", "ADAM", "ADAM dense"])
ALL = pytest.mark.parametrize("case", OPTIMIZERS)


def _compiled(case: str, backend: str | None) -> tuple[list[float], replicas.Copies]:
    sharded = sharded_model(*OPTIMIZERS[case])
    if backend is not None:
        sharded.module.over = torch.compile(sharded.module.over, backend=backend)
    losses = []
    for batch in models.batches(3):
        loss, _ = sharded(batch.of_rank(dist.get_rank(), 2))
        loss.backward()
        losses.append(float(loss))
    return losses, replicas.copies_of(sharded)


@pytest.mark.parametrize(
    "case, backend",
    [("FTRL", "aot_eager"), ("ADAM", "eager"), ("stock EXACT_ADAGRAD", "aot_eager")],
)
def test_a_compiled_dense_part_around_sharded_tables(case, backend) -> None:
    compiled = run_on_ranks(2, _compiled, case, backend)
    for found, expected in zip(compiled, run_on_ranks(2, _compiled, case, None), strict=True):
        assert found[0] == expected[0]
        for place, tensors in expected[1].items():
            assert all(map(torch.equal, tensors, found[1][place]))


APPLIED: dict[str, tuple[type, dict[str, Any]]] = {
    "FTRL": (optim.FTRL, {"lr": 0.1, "ftrl_beta": 1.0, "l1_reg": 1e-3}),
    "Adam": (optim.Adam, {"lr": 0.1, "weight_decay": 0.5}),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_copied_model_keeps_the_optimizers_applied_to_its_tables(name) -> None:
    cls, keywords = APPLIED[name]
    model = models.Model()
    _apply_optimizer_in_backward(cls, model.ebc.parameters(), keywords)
    first, second, _ = (batch.of_rank(0, 1) for batch in models.batches(3))
    model(first).backward()
    copied = copy.deepcopy(model)
    pairs = list(zip(model.ebc.parameters(), copied.ebc.parameters(), strict=True))
    before = [theirs.detach().clone() for _, theirs in pairs]
    model(second).backward()
    assert all(map(torch.equal, before, [theirs for _, theirs in pairs]))
    copied(second).backward()
    for own, theirs in pairs:
        assert torch.equal(own, theirs) and theirs.grad is None
        found, expected = (applied_optimizer(each, "t0") for each in (theirs, own))
        assert found is not None and expected is not None and found is not expected
        assert found.fused_params() == expected.fused_params()


def test_a_copy_of_a_plain_parameter_has_no_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    optim.FTRL([parameter], lr=0.1)
    copied = copy.deepcopy(parameter)
    assert torch.equal(copied, parameter) and copied is not parameter and vars(copied) == {}


def _copied_and_sharded(cls: type, keywords: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    model = models.Model()
    _apply_optimizer_in_backward(cls, model.ebc.parameters(), keywords)
    copied = copy.deepcopy(model)
    sharder = EmbeddingBagCollectionSharder()
    sharded = models.shard(copied, [sharder], models.plan_for(copied, [sharder], "row_wise"))
    modules = models.modules_by_table(sharded).values()
    return [(module.optim_type, dict(module.hyperparameters)) for module in modules]


def test_a_copied_model_is_sharded_with_its_optimizers() -> None:
    for found in run_on_ranks(2, _copied_and_sharded, *APPLIED["FTRL"]):
        assert found
        for optimizer, hyperparameters in found:
            assert optimizer == OptimType.FTRL
            assert hyperparameters["learning_rate"] == 0.1 and hyperparameters["l1_reg"] == 1e-3


QUARTERS = functools.partial(torch.nn.init.constant_, val=0.25)


def _from_meta(case: str, pooled: bool, device: str, keywords: dict[str, bool]) -> dict[str, Any]:
    """Devices and values of weights and states of a model whose tables are on meta."""
    optimizer, hyperparameters = OPTIMIZERS[case]
    params = {"optimizer": optimizer, **hyperparameters}
    sharders: list[Any] = [StockSharder(params)]
    if isinstance(optimizer, OptimType):
        sharders = [EmbeddingBagCollectionSharder(params), EmbeddingCollectionSharder(params)]
    tables = models.BAG_TABLES if pooled else models.SEQUENCE_TABLES
    model = models.Model(tables, pooled)
    meta = torch.device("meta")
    configs = model.ebc.embedding_bag_configs() if pooled else model.ec.embedding_configs()
    configs = [dataclasses.replace(config, init_fn=QUARTERS) for config in configs]
    if pooled:
        model.ebc = EmbeddingBagCollection(configs, device=meta)
    else:
        model.ec = EmbeddingCollection(tables=configs, device=meta)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device(device),
        plan=models.plan_for(model, sharders, "table_wise", tables),
        sharders=sharders,
        **keywords,
    )
    start = [copies[0] for copies in replicas.copies_of(sharded).values()]
    if device == "cpu":
        if not keywords.get("init_data_parallel", True):
            sharded.init_data_parallel()
        sharded(models.batches(1, tables)[0].of_rank(dist.get_rank(), 2)).backward()
    return {
        "start": [weight.to("cpu") if device == "cpu" else weight.shape for weight in start],
        "devices": {t.device.type for c in replicas.copies_of(sharded).values() for t in c},
    }


@OURS
@pytest.mark.parametrize(
    "keywords",
    [{}, {"init_data_parallel": False}, {"init_data_parallel": False, "init_parameters": False}],
    ids=lambda keywords: ",".join(keywords) or "defaults",
)
def test_tables_on_meta_are_built_and_initialised_when_sharded(case, keywords) -> None:
    pooled = "dense" not in case
    for found in run_on_ranks(2, _from_meta, case, pooled, "cpu", keywords):
        assert found["devices"] == {"cpu"} and found["start"]
        assert all((weight == 0.25).all() for weight in found["start"])


@ALL
def test_sharded_on_meta(case) -> None:
    keywords = {"init_data_parallel": False, "init_parameters": False}
    for found in run_on_ranks(2, _from_meta, case, True, "meta", keywords):
        assert found["devices"] == {"meta"}


def _reset(case: str) -> tuple[list[torch.Tensor], bool]:
    """Weights after ``reset_parameters()``, and whether the states kept their bits."""
    optimizer, hyperparameters = OPTIMIZERS[case]
    model = models.Model()
    configs = model.ebc.embedding_bag_configs()
    model.ebc = EmbeddingBagCollection(
        [dataclasses.replace(config, init_fn=QUARTERS) for config in configs]
    )
    ours = isinstance(optimizer, OptimType)
    sharder = (EmbeddingBagCollectionSharder if ours else StockSharder)(
        {"optimizer": optimizer, **hyperparameters}
    )
    sharded = models.shard(model, [sharder], models.plan_for(model, [sharder], "table_wise"))
    for batch in models.batches(3):
        sharded(batch.of_rank(dist.get_rank(), 2)).backward()
    sharded.state_dict()  # brings sleeping rows up to date, as writing their weights will
    before = replicas.copies_of(sharded)
    sharded.module.ebc.reset_parameters()
    after = replicas.copies_of(sharded)
    kept = all(
        torch.equal(a, b)
        for place in before
        for a, b in zip(before[place][1:], after[place][1:], strict=True)
    )
    return [tensors[0] for tensors in after.values()], kept


@ALL
def test_reset_parameters_takes_init_fn_and_leaves_states(case) -> None:
    for weights, kept in run_on_ranks(2, _reset, case):
        assert weights and all((weight == 0.25).all() for weight in weights)
        assert kept


CASTS: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(torch.float16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
}


def _cast(case: str, cast: str, tables_too: bool) -> replicas.Copies:
    """Trains one step, casts the dense part forth and back, trains another."""
    sharded = sharded_model(*OPTIMIZERS[case])
    for number, batch in enumerate(models.batches(2)):
        if number == 1:
            CASTS[cast](sharded if tables_too else sharded.module.over)
            if tables_too:
                CASTS[cast](sharded.module.ebc)
            sharded.module.over.float()
        sharded(batch.of_rank(dist.get_rank(), 2))[0].backward()
    return replicas.copies_of(sharded)


@pytest.mark.parametrize("cast", CASTS)
@OURS
def test_a_cast_of_the_sharded_model_leaves_tables_and_states(case, cast) -> None:
    both, dense_alone = (run_on_ranks(2, _cast, case, cast, tables) for tables in (True, False))
    for found, expected in zip(both, dense_alone, strict=True):
        for place, tensors in expected.items():
            assert all(tensor.dtype == torch.float32 for tensor in found[place])
            assert all(map(torch.equal, tensors, found[place]))


def _clipped(case: str, how: str) -> replicas.Copies:
    optimizer, hyperparameters = OPTIMIZERS[case]
    if how == "fused_params":
        clip = {"gradient_clipping": True, "max_gradient": 1e-4}
        hyperparameters = {**hyperparameters, **clip}
    sharded = sharded_model(optimizer, hyperparameters)
    fused: Any = sharded.fused_optimizer
    if how == "optimizer":
        fused = GradientClippingOptimizer(fused, clipping=GradientClipping.NORM, max_gradient=1e-4)
    for batch in models.batches(2):
        fused.zero_grad()
        sharded(batch.of_rank(dist.get_rank(), 2))[0].backward()
        fused.step()
    return replicas.copies_of(sharded)


@pytest.mark.parametrize("case", ["FTRL", "ADAM", "stock EXACT_ADAGRAD"])
def test_gradient_clipping_optimizer_does_not_reach_fused_gradients(case) -> None:
    without, with_optimizer, with_fused_params = (
        run_on_ranks(2, _clipped, case, how) for how in ("", "optimizer", "fused_params")
    )
    for plain, unclipped, clipped in zip(without, with_optimizer, with_fused_params, strict=True):
        for place, tensors in plain.items():
            assert all(map(torch.equal, tensors, unclipped[place]))
        assert any(not torch.equal(plain[p][1], clipped[p][1]) for p in plain)


def _clipped_by_value(case: str) -> str:
    sharded = sharded_model(*OPTIMIZERS[case])
    fused = GradientClippingOptimizer(
        sharded.fused_optimizer, clipping=GradientClipping.VALUE, max_gradient=1e-4
    )
    sharded(models.batches(1)[0].of_rank(dist.get_rank(), 2))[0].backward()
    try:
        fused.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["FTRL", "ADAM", "stock EXACT_ADAGRAD"])
def test_clipping_fused_gradients_by_value_finds_none(case) -> None:
    for message in run_on_ranks(2, _clipped_by_value, case):
        assert "Expected !nested_tensorlist[0].empty() to be true, but got false" in message


def test_a_copy_loses_the_optimizers_of_torchrec() -> None:
    model = models.Model()
    _apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    assert all(hasattr(each, "_optimizer_classes") for each in model.ebc.parameters())
    copied = copy.deepcopy(model)
    assert not any(hasattr(each, "_optimizer_classes") for each in copied.ebc.parameters())
