"""Row-wise states of shards of columns whose widths a plan by hand chose, in checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec.distributed.sharding_plan import column_wise as columns_by_rank
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from . import any_width, models
from .models import Table
from .ranks import run_on_ranks

TABLES = (Table("t", 5, 8, ("f",)),)
ROW_WISE = {
    OptimType.EXACT_ROWWISE_ADAGRAD: {"learning_rate": 0.1, "eps": 1e-3},
    OptimType.PARTIAL_ROWWISE_ADAM: {"learning_rate": 0.1},
}
# Columns of each rank; [8] is table_wise.
CUTS = {"by hand": [6, 2], "halves": [4, 4], "whole": [8]}


def _cut(optimizer: OptimType, cut: str) -> Any:
    model = models.Model(TABLES)
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, **ROW_WISE[optimizer]})
    sharding = (
        table_wise(rank=0, compute_kernel="fused")
        if cut == "whole"
        else columns_by_rank(size_per_rank=CUTS[cut], compute_kernel="fused")
    )
    plan = construct_module_sharding_plan(
        model.ebc, {"t": sharding}, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    sharded = models.shard(model, [sharder], ShardingPlan({"ebc": plan}))
    models.write_weights(sharded, models.initial_weights(TABLES))
    return sharded


def _shard_states(sharded: Any) -> dict[tuple[int, int], torch.Tensor]:
    """The ``[rows]`` state of each of this rank's shards, by its columns."""
    found = {}
    for kernel in models.kernels_of(sharded):
        states = kernel.emb_module.split_optimizer_states()
        for config, of_shard in zip(kernel._config.embedding_tables, states, strict=True):
            first = config.local_metadata.shard_offsets[1]
            found[first, first + config.local_cols] = of_shard[-1].clone()
    return found


def _shards_after(optimizer: OptimType, cut: str, folder: str, save: bool) -> Any:
    sharded = _cut(optimizer, cut)
    if save:
        any_width.train(sharded, models.batches(2, TABLES))
    state = {"optimizer": sharded.fused_optimizer.state_dict()}
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        sharded.fused_optimizer.load_state_dict(state["optimizer"])
    return _shard_states(sharded)


@pytest.mark.parametrize("target", CUTS)
@pytest.mark.parametrize("source", CUTS)
@pytest.mark.parametrize("optimizer", list(ROW_WISE), ids=lambda o: o.name)
def test_row_wise_states_of_columns_that_were_cut_by_hand(optimizer, source, target, tmp_path):
    saved = run_on_ranks(2, _shards_after, optimizer, source, str(tmp_path), True)
    loaded = run_on_ranks(2, _shards_after, optimizer, target, str(tmp_path), False)
    by_column = torch.empty(5, 8, dtype=torch.float64)
    for (first, last), state in (item for rank in saved for item in rank.items()):
        by_column[:, first:last] = state.double().unsqueeze(1)
    assert len(by_column.unique()) > 5 - (source == "whole")
    found = {columns: state for rank in loaded for columns, state in rank.items()}
    assert [last - first for first, last in sorted(found)] == CUTS[target]
    for (first, last), state in found.items():
        assert torch.equal(state, by_column[:, first:last].mean(1).float())
