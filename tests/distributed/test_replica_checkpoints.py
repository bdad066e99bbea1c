"""Checkpoints of ``DMPCollection``, whose tables are ``DTensor``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as StockSharder

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from ..hyperparameters import HYPERPARAMETERS
from . import models, replicas
from .ranks import run_on_ranks

FTRL, ADAM, FBGEMMS = OptimType.FTRL, OptimType.ADAM, EmbOptimType.EXACT_ADAGRAD


def _replicated(optimizer: Any, sharding_type: str) -> replicas.DMPCollection:
    if isinstance(optimizer, OptimType):
        params = {"optimizer": optimizer, **HYPERPARAMETERS[optimizer]}
        sharder: Any = EmbeddingBagCollectionSharder(params)
    else:
        sharder = StockSharder({"optimizer": optimizer, "learning_rate": 0.1})
    model = replicas.replicate(models.Model(), [sharder], sharding_type)
    replicas.write_tables(model, models.initial_weights())
    return model


def _state(model: replicas.DMPCollection) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _shards(model: replicas.DMPCollection) -> list[dict[str, list[Any]]]:
    """This rank's weights and states, for ``assemble``: [weights, first states, ...]."""
    kinds: list[dict[str, list[Any]]] = []
    for (table, offsets), tensors in replicas.copies_of(model).items():
        for number, tensor in enumerate(tensors):
            kinds += [{}] if number == len(kinds) else []
            place = offsets[: tensor.dim()]
            kinds[number].setdefault(table, []).append((place, tensor))
    return kinds


def _save(optimizer: Any, sharding_type: str, folder: str) -> list[dict[str, list[Any]]]:
    model = _replicated(optimizer, sharding_type)
    for batch in models.batches(2):
        model(batch.of_rank(dist.get_rank(), 4)).backward()
    model.sync()
    dcp.save(_state(model), checkpoint_id=folder)
    return _shards(model)


def _load(
    optimizer: Any, sharding_type: str, folder: str
) -> tuple[list[dict[str, list[Any]]], set[int]]:
    """Weights and states, and the clocks."""
    model = _replicated(optimizer, sharding_type)
    state = _state(model)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    clocks = {int(kernel.emb_module.iter) for kernel in replicas.kernels_of(model)}
    return _shards(model), clocks


def _whole(ranks: list[list[dict[str, list[Any]]]]) -> list[dict[str, torch.Tensor]]:
    number = max(len(kinds) for kinds in ranks)
    return [models.assemble([r[kind] for r in ranks if len(r) > kind]) for kind in range(number)]


@pytest.mark.parametrize(
    "optimizer, read",
    [
        (FBGEMMS, "table_wise"),
        (FTRL, "table_wise"),
        (FTRL, "row_wise"),
        (ADAM, "table_wise"),
        (ADAM, "row_wise"),
    ],
)
def test_every_plan_reads_states_of_rows_and_columns(optimizer, read, tmp_path) -> None:
    written = run_on_ranks(4, _save, optimizer, "column_wise", str(tmp_path))
    loaded = run_on_ranks(4, _load, optimizer, read, str(tmp_path))
    pairs = zip(_whole(written), _whole([kinds for kinds, _ in loaded]), strict=True)
    for before, after in pairs:
        assert before.keys() == after.keys() == {"t0", "t1", "t2"}
        assert all(torch.equal(before[table], after[table]) for table in before)
    if optimizer == ADAM:
        assert {2} == set().union(*(clocks for _, clocks in loaded))


def _refusal(written: OptimType, read: OptimType, folder: str, through_dcp: bool) -> str:
    model = _replicated(read, "row_wise")
    before = replicas.copies_of(model)
    with pytest.raises((CheckpointException, ValueError)) as caught:
        if through_dcp:
            dcp.load(_state(model), checkpoint_id=folder)
        else:
            source = _replicated(written, "row_wise")
            model.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    for place, tensors in replicas.copies_of(model).items():
        assert all(torch.equal(a, b) for a, b in zip(before[place], tensors, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("through_dcp", [True, False])
@pytest.mark.parametrize(
    "written, read", [(FTRL, OptimType.EXACT_ADAGRAD), (OptimType.LAMB, ADAM)], ids=str
)
def test_another_optimizers_states_are_refused(written, read, through_dcp, tmp_path) -> None:
    run_on_ranks(4, _save, written, "row_wise", str(tmp_path))
    for message in run_on_ranks(4, _refusal, written, read, str(tmp_path), through_dcp):
        pattern = f"written with OptimType.{written.name}, but the table has OptimType.{read.name}"
        assert re.search(pattern, message), message


@pytest.mark.parametrize(
    "optimizer",
    [EmbOptimType.EXACT_ROWWISE_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD],
    ids=["FBGEMM", "ours"],
)
def test_states_of_rows_fit_plans_of_as_many_column_shards(optimizer, tmp_path) -> None:
    same, other = str(tmp_path / "same"), str(tmp_path / "other")
    written = run_on_ranks(4, _save, optimizer, "table_wise", same)
    loaded = run_on_ranks(4, _load, optimizer, "table_wise", same)
    for before, after in zip(_whole(written), _whole([k for k, _ in loaded]), strict=True):
        assert all(torch.equal(before[table], after[table]) for table in before)
    run_on_ranks(4, _save, optimizer, "column_wise", other)
    with pytest.raises(CheckpointException, match="Size mismatch between saved"):
        run_on_ranks(4, _load, optimizer, "table_wise", other)
