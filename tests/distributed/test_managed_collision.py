"""Managed collision: a row that is evicted starts afresh, its optimizer states too."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import torchrec_ext
from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

from ..modules import HYPERPARAMETERS, assert_same_bits, fill, make_module, snapshot
from . import models
from .ranks import run_on_ranks
from .updates import update_of

# Tables of a module are told apart by number, and the first one has two features.
FEATURES = {"t0": ["f0", "f1"], "t1": ["f2"]}
ROWS, DIM, RANKS = 8, 4, 2
IDS = 1000
OLD, NEW = [1, 2, 3], [11, 12, 13]
FRESH = 0.5  # the weight that rows start with


class RowWiseBags(embeddingbag.EmbeddingBagCollectionSharder):
    """TorchRec's sharder, which does not offer on CPU what managed collision needs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def _sharder(pooled: bool, fused_params: dict, dedup: bool = False):
    ours = isinstance(fused_params["optimizer"], OptimType)
    if pooled:
        bags = (EmbeddingBagCollectionSharder if ours else RowWiseBags)(fused_params)
        return ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=bags)
    sequences = EmbeddingCollectionSharder if ours else embedding.EmbeddingCollectionSharder
    return ManagedCollisionEmbeddingCollectionSharder(
        ec_sharder=sequences(fused_params, use_index_dedup=dedup)
    )


def _module(pooled: bool, buckets: int) -> torch.nn.Module:
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    configs = [
        config(
            name=name,
            num_embeddings=ROWS,
            embedding_dim=DIM,
            feature_names=features,
            init_fn=functools.partial(torch.nn.init.constant_, val=FRESH),
        )
        for name, features in FEATURES.items()
    ]
    collisions = {
        name: MCHManagedCollisionModule(
            zch_size=ROWS,
            device=torch.device("cpu"),
            eviction_interval=1,
            eviction_policy=LRU_EvictionPolicy(),
            input_hash_size=IDS,
            buckets=buckets,
        )
        for name in FEATURES
    }
    collection = ManagedCollisionCollection(collisions, configs)
    if pooled:
        return ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs), collection, return_remapped_features=True
        )
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(configs), collection, return_remapped_features=True
    )


def _sharded(
    pooled: bool, fused_params: dict, buckets: int = RANKS, dedup: bool = False
) -> torch.nn.Module:
    module = torch.nn.Sequential(_module(pooled, buckets))
    sharders = [_sharder(pooled, fused_params, dedup)]
    ranks = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(ranks, "cpu", local_world_size=ranks),
        constraints=dict.fromkeys(
            FEATURES,
            ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]),
        ),
    )
    return models.shard(
        module, sharders, planner.collective_plan(module, sharders, dist.group.WORLD)
    )


def _look_up(model: torch.nn.Module, ids: dict[str, list[int]], gradient: float) -> torch.Tensor:
    """Looks ids up, a bag for each lookup, with one gradient; gives the embeddings of ``f2``.

    An id goes to the rank that owns its part of all ids, so each rank adds an offset of its own.
    """
    own = dist.get_rank() * (IDS // RANKS)
    longest = max(len(each) for each in ids.values())
    bags = [[i + own] for f in ids for i in ids[f]]
    lengths = [int(n < len(each)) for each in ids.values() for n in range(longest)]
    features = KeyedJaggedTensor(
        keys=list(ids),
        values=torch.tensor([row for bag in bags for row in bag], dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )
    embeddings, remapped = model(features)
    if model.module[0].bagged:
        outputs = [embeddings[name][: len(ids[name])] for name in ids]
    else:
        outputs = [embeddings[name].values() for name in ids]
    (sum(output.sum() for output in outputs) * gradient).backward()
    return outputs[-1].detach(), remapped


def _tbe(model: torch.nn.Module):
    (lookup,) = model.module[0]._embedding_module._lookups
    (kernel,) = lookup._emb_modules
    return kernel.emb_module


def _states(module) -> list[list[torch.Tensor]]:
    return [[state.clone() for state in table] for table in module.split_optimizer_states()]


def _train_evict_and_look_up(pooled: bool, fused_params: dict) -> dict:
    """Trains rows of both tables, evicts those of the second and looks its new ids up."""
    model = _sharded(pooled, fused_params)
    for _ in range(3):
        _look_up(model, {"f0": OLD, "f1": OLD[:2], "f2": OLD}, 2.0)
    module = _tbe(model)
    found = {"before": _snapshot(module)}
    return found | _evict(model)


def _sleep_evict_and_look_up(fused_params: dict) -> dict:
    """The same, but the second table's rows sleep before, and nothing wakes them."""
    model = _sharded(True, fused_params)
    for ids in (OLD, OLD, [], [], []):
        _look_up(model, {"f0": OLD, "f1": [], "f2": ids}, 2.0)
    return _evict(model)


def _evict(model: torch.nn.Module) -> dict:
    fresh, remapped = _look_up(model, {"f0": [], "f1": [], "f2": NEW}, 0.0)
    first = dist.get_rank() * (ROWS // RANKS)
    module = _tbe(model)
    return {
        "fresh": fresh[: len(NEW)],
        "rows": [row - first for row in remapped["f2"].values()[: len(NEW)].tolist()],
        "after": _snapshot(module),
        "step": int(module.iter),
    }


def _snapshot(module) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    return [weight.clone() for weight in module.split_embedding_weights()], _states(module)


def _expected(optimizer: OptimType, fresh: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Rows that were never trained, with these weights, after one update without a gradient."""
    module = make_module(optimizer, [fresh.shape], "none", **HYPERPARAMETERS[optimizer])
    fill(module, [fresh])
    module.set_optimizer_step(step - 1)
    rows = len(fresh)
    output = module(torch.arange(rows), torch.arange(rows + 1))
    output.backward(torch.zeros_like(output))
    return snapshot(module)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_an_evicted_row_starts_afresh(optimizer, pooled):
    fused_params = {"optimizer": optimizer, **HYPERPARAMETERS[optimizer]}
    for found in run_on_ranks(RANKS, _train_evict_and_look_up, pooled, fused_params):
        rows = found["rows"]
        assert sorted(rows) == [0, 1, 2], "the test needs every old row of this rank evicted"
        (first, second), states = found["before"]
        assert (found["fresh"] == FRESH).all() and (second[rows] != FRESH).all()
        assert all(state[rows].any() for state in states[1]), "the test needs rows with a history"
        weights, after = found["after"]
        # The other table keeps its rows and states.
        assert_same_bits([weights[0], *after[0]], [first, *states[0]])
        found_rows = [tensor[rows] for tensor in (weights[1], *after[1])]
        assert_same_bits(found_rows, _expected(optimizer, found["fresh"], found["step"]))


def test_in_dense_mode_an_evicted_row_owes_no_decay():
    """A row that slept would be caught up to the clock, with the old row's sleep."""
    values = {**HYPERPARAMETERS[OptimType.ADAM], "sparse_mode": "dense"}
    fused_params = {"optimizer": OptimType.ADAM, **values}
    for found in run_on_ranks(RANKS, _sleep_evict_and_look_up, fused_params):
        assert sorted(found["rows"]) == [0, 1, 2], "the test needs every old row evicted"
        assert (found["fresh"] == FRESH).all()
        weights, after = found["after"]
        lazy = _expected(OptimType.ADAM, found["fresh"], found["step"])
        assert_same_bits([weights[1][found["rows"]], *(s[found["rows"]] for s in after[1])], lazy)


@pytest.mark.parametrize("pooled", [True, False])
def test_ftrl_preserves_the_fresh_weight_of_an_evicted_row(pooled):
    """Its first update, here without a gradient, starts from the weight that TorchRec wrote."""
    values = {**HYPERPARAMETERS[OptimType.FTRL], "preserve_initial_weight": True}
    fused_params = {"optimizer": OptimType.FTRL, **values}
    for found in run_on_ranks(RANKS, _train_evict_and_look_up, pooled, fused_params):
        rows = found["rows"]
        assert sorted(rows) == [0, 1, 2], "the test needs every old row of this rank evicted"
        weights, states = found["after"]
        fresh = torch.full_like(weights[1][rows], FRESH)
        torch.testing.assert_close(weights[1][rows], fresh, rtol=1e-6, atol=0.0)
        assert (found["before"][0][1][rows] != FRESH).all() and not states[1][1][rows].any()


def test_fbgemm_keeps_the_states_of_an_evicted_row():
    fused_params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    for found in run_on_ranks(RANKS, _train_evict_and_look_up, True, fused_params):
        rows = found["rows"]
        assert torch.equal(found["after"][1][1][0][rows], found["before"][1][1][0][rows])
        assert found["before"][1][1][0][rows].all()


def test_fbgemm_cannot_evict_with_row_wise_adagrad():
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    message = "Could not run 'fbgemm::reset_weight_momentum' with arguments from the 'CPU' backend"
    with pytest.raises(NotImplementedError, match=message):
        run_on_ranks(RANKS, _train_evict_and_look_up, True, fused_params)


COLUMNS = {
    "stock": (EmbOptimType.EXACT_ADAGRAD, OptimType.EXACT_ADAGRAD),
    "FTRL": (OptimType.FTRL, OptimType.FTRL),
    "ADAM": (OptimType.ADAM, OptimType.ADAM),
}


@pytest.mark.parametrize(("pooled", "dedup"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("column", COLUMNS)
def test_rows_that_stay_are_trained(column, pooled, dedup):
    given, optimizer = COLUMNS[column]

    def train() -> tuple[torch.Tensor, torch.Tensor]:
        torchrec_ext.install()  # deduplicates indices
        fused_params = {"optimizer": given, **HYPERPARAMETERS[optimizer]}
        model = _sharded(pooled, fused_params, dedup=dedup)
        ids = {"f0": OLD, "f1": OLD[:2], "f2": OLD}
        start, _ = _look_up(model, ids, 2.0)
        for _ in range(3):
            _look_up(model, ids, 2.0)
        return start, _look_up(model, ids, 0.0)[0]

    update = update_of(optimizer, **HYPERPARAMETERS[optimizer])
    for start, found in run_on_ranks(RANKS, train):
        expected, states = start.double(), {}
        for step in range(1, 5):
            # TorchRec divides by the number of ranks.
            update(expected, torch.full_like(expected, 2.0 / RANKS), states, step)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("column", COLUMNS)
def test_buckets_that_ranks_cannot_share_are_refused_by_torchrec(column):
    fused_params = {"optimizer": COLUMNS[column][0], "learning_rate": 0.1}
    message = r"Table 't0' has uneven buckets per rank \(3 buckets across 2 ranks\)"
    with pytest.raises(ValueError, match=message):
        run_on_ranks(RANKS, _sharded, True, fused_params, 3)


@pytest.mark.parametrize("column", COLUMNS)
def test_torchrec_shards_managed_collision_row_wise_only(column):
    def build() -> None:
        sharder = _sharder(False, {"optimizer": COLUMNS[column][0], "learning_rate": 0.1})
        module = _module(False, RANKS)
        sharding = construct_module_sharding_plan(
            module._embedding_module,
            {name: table_wise(rank=0) for name in FEATURES},
            sharder._e_sharder,
            local_size=1,
            world_size=1,
            device_type="cpu",
        )
        for parameter in sharding.values():
            parameter.compute_kernel = "fused"
        models.shard(torch.nn.Sequential(module), [sharder], ShardingPlan({"0": sharding}))

    with pytest.raises(AssertionError, match="Only ROW_WISE sharding is supported."):
        run_on_ranks(1, build)
