"""``DMPCollection.sync()`` on two replicas of two ranks: means of weights and states."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as StockSharder
from torchrec.distributed.types import ShardingStrategy
from torchrec.modules.embedding_configs import DataType

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, PlanError
from torchrec_ext.distributed.replica_sync import cache_tensors

from ..hyperparameters import HYPERPARAMETERS
from ..modules import make_module
from . import models, replicas
from .ranks import run_on_ranks

FTRL = HYPERPARAMETERS[OptimType.FTRL]
ADAM = HYPERPARAMETERS[OptimType.ADAM]
CASES: dict[str, tuple[OptimType, dict[str, Any]]] = {
    **{optimizer.name: (optimizer, HYPERPARAMETERS[optimizer]) for optimizer in OptimType},
    "FTRL power": (OptimType.FTRL, {**FTRL, "learning_rate_power": -0.7}),
    "FTRL preserve": (
        OptimType.FTRL,
        {**FTRL, "preserve_initial_weight": True, "l2_shrinkage_reg": 0.05},
    ),
    "ADAM dense": (OptimType.ADAM, {**ADAM, "sparse_mode": "dense"}),
    "ADAM per_row": (OptimType.ADAM, {**ADAM, "bias_correction": "per_row"}),
    "SGD momentum": (OptimType.EXACT_SGD, {"learning_rate": 0.1, "momentum": 0.9}),
}
RUNS = [
    *[(case, "table_wise") for case in CASES],
    *[
        (case, sharding_type)
        for case in ("FTRL", "FTRL preserve", "ADAM", "ADAM dense")
        for sharding_type in ("row_wise", "column_wise")
    ],
    ("EXACT_ROWWISE_ADAGRAD", "row_wise"),
]
# TorchRec alternates: these ranks hold the same shards.
REPLICAS = ((0, 1), (2, 3))


def _replicated(
    optimizer: Any, hyperparameters: dict[str, Any], sharding_type: str, **keywords: Any
) -> replicas.DMPCollection:
    ours = isinstance(optimizer, OptimType)
    sharder = (EmbeddingBagCollectionSharder if ours else StockSharder)(
        {"optimizer": optimizer, **hyperparameters}
    )
    model = replicas.replicate(models.Model(), [sharder], sharding_type, **keywords)
    replicas.write_tables(model, models.initial_weights())
    return model


def _train(optimizer: Any, hyperparameters: dict[str, Any], sharding_type: str) -> dict[str, Any]:
    """Two updates apart, ``sync()``, two updates on the same batches."""
    model = _replicated(optimizer, hyperparameters, sharding_type)
    rank = dist.get_rank()
    first, second, third, fourth = models.batches(4)
    start = replicas.copies_of(model)
    for batch in (first, second):
        # Few examples, so that some rows are looked up by no replica.
        model(batch.of_rank(rank, models.BATCH_SIZE)).backward()
    before = replicas.copies_of(model)
    model.sync()
    after = replicas.copies_of(model)
    for batch in (third, fourth):
        model(batch.of_rank(rank // 2, 2)).backward()
    return {"start": start, "before": before, "after": after, "end": replicas.copies_of(model)}


def _closed_form(linear: Tensor, accum: Tensor, weight: Tensor, h: dict[str, Any]) -> Tensor:
    """FTRL's weight in float64; ``weight`` where it is not defined."""
    power = -h.get("learning_rate_power", -0.5)
    denominator = (h["ftrl_beta"] + accum.double() ** power) / h["learning_rate"] + h["l2_reg"]
    linear = linear.double()
    solution = (linear.sign() * h["l1_reg"] - linear) / denominator
    solution[linear.abs() <= h["l1_reg"]] = 0.0
    return torch.where(denominator == 0.0, weight.double(), solution)


def _begun(copies: list[Tensor], h: dict[str, Any]) -> list[Tensor]:
    """Weights and states, where rows that wait for their first update have begun."""
    if not h.get("preserve_initial_weight"):
        return copies
    weight, linear, accum = copies
    denominator = (h["ftrl_beta"] + accum.sqrt()) / h["learning_rate"] + h["l2_reg"]
    seed = -weight * denominator - weight.sign() * h["l1_reg"]
    return [weight, torch.where(linear.signbit() & (linear == 0), seed, linear), accum]


def _row_changed(before: list[Tensor], other: list[Tensor]) -> Tensor:
    differs = [a != b for a, b in zip(before, other, strict=True)]
    return torch.stack([d if d.dim() == 1 else d.any(1) for d in differs]).any(0)


@pytest.mark.parametrize("case, sharding_type", RUNS, ids=[" ".join(run) for run in RUNS])
def test_replicas_have_the_means_and_go_on_alike(case, sharding_type) -> None:
    optimizer, hyperparameters = CASES[case]
    results = run_on_ranks(4, _train, optimizer, hyperparameters, sharding_type)
    seen_together, seen_apart = False, False
    for left, right in ((results[a], results[b]) for a, b in REPLICAS):
        for place, averaged in left["after"].items():
            copies = [_begun(each["before"][place], hyperparameters) for each in (left, right)]
            pairs = list(zip(*copies, strict=True))
            means = [torch.stack(pair).double().mean(0) for pair in pairs]
            differs = _row_changed(*(each["before"][place] for each in (left, right)))
            if hyperparameters.get("preserve_initial_weight"):
                waiting = left["before"][place][1].signbit() & (left["before"][place][1] == 0)
                still = averaged[1].signbit() & (averaged[1] == 0)
                assert torch.equal(waiting[~differs], still[~differs]) and not still[differs].any()
                means[1] = torch.where(differs[:, None], means[1], averaged[1])
            if optimizer == OptimType.FTRL:
                assert torch.equal(averaged[0][~differs], pairs[0][0][~differs])
                exact = _closed_form(averaged[1], averaged[2], means[0], hyperparameters)
                means[0] = torch.where(differs[:, None], exact, means[0])
            seen_apart |= bool(differs.any())
            seen_together |= not bool(differs.all())
            for found, mean in zip(averaged, means, strict=True):
                assert torch.allclose(found.double(), mean, rtol=1e-6, atol=1e-7)
    assert seen_apart
    assert seen_together or "dense" in case  # there every row moves
    for key in ("after", "end"):
        for left, right in ((results[a][key], results[b][key]) for a, b in REPLICAS):
            assert left.keys() == right.keys()
            for place, tensors in left.items():
                assert all(map(torch.equal, tensors, right[place]))
    assert any(
        not torch.equal(each["after"][place][0], each["end"][place][0])
        for each in results
        for place in each["end"]
    )


@pytest.mark.parametrize("installed", [False, True])
def test_fbgemms_adagrad_is_averaged_by_torchrec(installed) -> None:
    if installed:
        torchrec_ext.install()
    arguments = (EmbOptimType.EXACT_ADAGRAD, {"learning_rate": 0.1}, "table_wise")
    results = run_on_ranks(4, _train, *arguments)
    for left, right in ((results[a], results[b]) for a, b in REPLICAS):
        for place, averaged in left["after"].items():
            pairs = zip(left["before"][place], right["before"][place], strict=True)
            for found, pair in zip(averaged, pairs, strict=True):
                mean = torch.stack(pair).double().mean(0)
                assert torch.allclose(found.double(), mean, rtol=1e-6, atol=1e-7)


def _equal_replicas() -> tuple[replicas.Copies, replicas.Copies]:
    model = _replicated(OptimType.FTRL, FTRL, "row_wise")
    model(models.batches(1)[0].of_rank(dist.get_rank() // 2, 2)).backward()
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.03  # the closed form would give other weights
    before = replicas.copies_of(model)
    model.sync()
    return before, replicas.copies_of(model)


def test_equal_replicas_keep_their_bits_after_the_learning_rate_changed() -> None:
    for before, after in run_on_ranks(4, _equal_replicas):
        for place, tensors in before.items():
            assert all(map(torch.equal, tensors, after[place]))


def _followed_rate() -> list[tuple[list[Tensor], Tensor]]:
    model = _replicated(OptimType.FTRL, FTRL, "table_wise")
    model(models.batches(1)[0].of_rank(dist.get_rank(), 4)).backward()
    before = replicas.copies_of(model)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.03
    model.sync()
    return [(after, before[place][0]) for place, after in replicas.copies_of(model).items()]


def test_ftrl_derives_weights_with_the_learning_rate_of_the_moment() -> None:
    hyperparameters = {**FTRL, "learning_rate": 0.03}
    derived = 0
    for (weight, linear, accum), before in (p for r in run_on_ranks(4, _followed_rate) for p in r):
        exact = _closed_form(linear, accum, weight, hyperparameters)
        moved = (weight != before).any(1)
        derived += int(moved.sum())
        assert torch.allclose(weight[moved].double(), exact[moved], rtol=1e-6, atol=1e-7)
    assert derived > 0


def _half() -> replicas.Copies:
    model = models.Model()
    model.ebc = EmbeddingBagCollection(
        [
            dataclasses.replace(config, data_type=DataType.FP16)
            for config in model.ebc.embedding_bag_configs()
        ]
    )
    sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.FTRL, **FTRL})
    replicated = replicas.replicate(model, [sharder], "table_wise", ranks_per_replica=1)
    replicas.write_tables(replicated, models.initial_weights())
    replicated(models.batches(1)[0].of_rank(dist.get_rank(), 2)).backward()
    replicated.sync()
    return replicas.copies_of(replicated)


def test_float16_weights_are_derived_from_float32_states() -> None:
    left, right = run_on_ranks(2, _half)
    for place, (weight, linear, accum) in left.items():
        assert weight.dtype == torch.float16 and accum.dtype == torch.float32
        assert all(map(torch.equal, (weight, linear, accum), right[place]))
        exact = _closed_form(linear, accum, weight, FTRL)
        looked_up = (accum != 0.0).any(1)
        assert looked_up.any()
        assert torch.allclose(
            weight[looked_up].double(), exact[looked_up], rtol=2**-11 + 1e-6, atol=2**-25
        )


def _mixed() -> tuple[dict[str, list[str]], replicas.Copies]:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.optim import RowWiseAdagrad

    from torchrec_ext.optim import FTRL as FtrlClass

    model = models.Model()
    tables = model.ebc.embedding_bags
    for name, cls in (("t0", FtrlClass), ("t1", RowWiseAdagrad), ("t2", FtrlClass)):
        _apply_optimizer_in_backward(cls, tables[name].parameters(), {"lr": 0.1})
    replicated = replicas.replicate(model, [EmbeddingBagCollectionSharder()], "row_wise")
    replicated(models.batches(1)[0].of_rank(dist.get_rank(), 4)).backward()
    replicated.sync()
    kinds = {
        kernel.config.embedding_tables[0].name: [type(kernel.emb_module).__name__]
        for kernel in models.kernels_of(replicated)
    }
    return kinds, replicas.copies_of(replicated)


def test_tables_of_fbgemm_and_ours_are_averaged_together() -> None:
    results = run_on_ranks(4, _mixed)
    assert {name for kinds, _ in results for each in kinds.values() for name in each} == {
        "TableBatchedEmbeddingBags",
        "SplitTableBatchedEmbeddingBagsCodegen",
    }
    for left, right in ((results[a][1], results[b][1]) for a, b in REPLICAS):
        for place, tensors in left.items():
            assert all(map(torch.equal, tensors, right[place]))


def _refused(case: str) -> tuple[str, bool]:
    """The error, and whether weights and states kept their bits."""
    optimizer = OptimType.ADAM if case == "ADAM weights alone" else OptimType.FTRL
    model = _replicated(optimizer, HYPERPARAMETERS[optimizer], "row_wise")
    model(models.batches(1)[0].of_rank(dist.get_rank(), 4)).backward()
    first_replica = dist.get_rank() % 2 == 0
    for module in set(models.modules_by_table(model).values()):
        if case == "step" and first_replica:
            module.set_optimizer_step(7)
    for group in model.fused_optimizer.param_groups:
        if case == "learning rate" and first_replica:
            group["lr"] = 0.25
    before = replicas.copies_of(model)
    message = ""
    try:
        model.sync(include_optimizer_state="alone" not in case)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    after = replicas.copies_of(model)
    states = slice(1, None) if case == "ADAM weights alone" else slice(None)
    kept = all(
        torch.equal(a, b)
        for place in before
        for a, b in zip(before[place][states], after[place][states], strict=True)
    )
    return message, kept


@pytest.mark.parametrize(
    "case, message",
    [
        ("step", "tables ['t0', 't2']: step differs between replicas: [7, 1]"),
        ("learning rate", "learning_rate differs between replicas: [0.25, 0.1]"),
        ("weights alone", "sync(include_optimizer_state=False) would be undone"),
    ],
)
def test_what_sync_refuses_changes_nothing(case, message) -> None:
    for found, kept in run_on_ranks(4, _refused, case):
        assert message in found
        assert kept


def test_adam_may_average_weights_alone() -> None:
    assert run_on_ranks(4, _refused, "ADAM weights alone") == [("", True)] * 4


def _fully_sharded() -> str:
    try:
        _replicated(OptimType.FTRL, FTRL, "row_wise", strategy=ShardingStrategy.FULLY_SHARDED)
    except PlanError as error:
        return str(error)
    return ""


def test_fully_sharded_is_refused() -> None:
    for message in run_on_ranks(4, _fully_sharded):
        assert "OptimType.FTRL does not train under ShardingStrategy.FULLY_SHARDED" in message


@dataclasses.dataclass
class _Context:
    modules_to_sync: list[tuple[Any, Any]]


@dataclasses.dataclass
class _ManagedCollision:
    _table_to_tbe_and_index: dict[str, tuple[Any, int]]


def test_managed_collision_is_refused_for_states_that_it_would_lose() -> None:
    context = _Context(
        [(_ManagedCollision({"a": (make_module(OptimType.FTRL, [(3, 4)]), 0)}), None)]
    )
    with pytest.raises(PlanError, match=r"table 'a': .*\['linear', 'accum'\] of OptimType.FTRL"):
        cache_tensors(lambda *_: None, None, [context])
