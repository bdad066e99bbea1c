"""The planner counts the memory and the traffic of our states, and nothing else changes."""

import copy
from typing import Any

import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    construct_split_state,
)
from torchrec.distributed import embedding, embeddingbag
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator as ShardPerfEstimator,
)
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingStorageEstimator,
)
from torchrec.modules.embedding_configs import DataType

import torchrec_ext
from torchrec_ext import OptimType, optim
from torchrec_ext.distributed import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    planner,
)
from torchrec_ext.optimizers import spec_of

from . import planning
from .planning import BATCH_SIZE, DIM, RANKS, ROWS

SHARDERS = {
    (True, "ours"): EmbeddingBagCollectionSharder,
    (False, "ours"): EmbeddingCollectionSharder,
    (True, "stock"): embeddingbag.EmbeddingBagCollectionSharder,
    (False, "stock"): embedding.EmbeddingCollectionSharder,
}
# Bytes of a table of 1000 x 64, by hand: [rows, D] states take 256,000, [rows] states 4,000.
BYTES: list[tuple[OptimType, dict[str, Any], int]] = [
    (OptimType.FTRL, {"l1_reg": 0.5}, 512_000),
    (OptimType.ADAM, {}, 512_000),
    (OptimType.ADAM, {"bias_correction": "per_row"}, 516_000),
    (OptimType.ADAM, {"sparse_mode": "dense"}, 516_000),
    (OptimType.PARTIAL_ROWWISE_ADAM, {}, 260_000),
    (OptimType.LAMB, {}, 512_000),
    (OptimType.EXACT_ADAGRAD, {}, 256_000),
    (OptimType.EXACT_ROWWISE_ADAGRAD, {}, 4_000),
    (OptimType.EXACT_SGD, {}, 0),
    (OptimType.EXACT_SGD, {"momentum": 0.9}, 256_000),
]
KEY = ("t0", "table_wise", "fused")


def _plain(pooled: bool = True, dtype: DataType = DataType.FP16) -> tuple[Any, Any]:
    """The same options of a table for whose optimizer TorchRec counts nothing."""
    module = planning.collection(pooled=pooled, dtype=dtype)
    planning.apply(module, torch.optim.SGD)
    return module, SHARDERS[pooled, "ours"]({"optimizer": OptimType.FTRL})


def _ours(optimizer: OptimType, hyperparameters: dict[str, Any], how: str, **keywords: Any) -> Any:
    """A module with the optimizer, in the sharder's fused_params or as a class on the table."""
    module = planning.collection(**keywords)
    sharder_type = SHARDERS[keywords.get("pooled", True), "ours"]
    if how == "fused_params":
        return module, sharder_type({"optimizer": optimizer, **hyperparameters})
    planning.apply(module, optim.classes()[optimizer], **hyperparameters)
    return module, sharder_type()


@pytest.mark.parametrize("dtype", [DataType.FP16, DataType.FP32])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("how", ["fused_params", "class"])
@pytest.mark.parametrize(("optimizer", "hyperparameters", "size"), BYTES)
def test_states_count_as_float32_whatever_the_weights_are(
    optimizer, hyperparameters, size, how, pooled, dtype
):
    module, sharder = _ours(optimizer, hyperparameters, how, pooled=pooled, dtype=dtype)
    plain = _plain(pooled, dtype)
    found = planning.states_storage(module, sharder, plain, sharding_types=["table_wise"])
    assert found == {KEY: [(0, size)]}


@pytest.mark.parametrize("how", ["fused_params", "class"])
def test_torchrec_alone_counts_none_or_the_weights_once(how):
    """What this package corrects: float16 weights of 128,000 bytes, states of 512,000."""
    module, sharder = _ours(OptimType.FTRL, {}, how)
    plain = _plain()
    torchrec_ext.uninstall()
    found = planning.states_storage(module, sharder, plain, sharding_types=["table_wise"])
    assert found == {KEY: [(0, 0 if how == "fused_params" else 128_000)]}


@pytest.mark.parametrize("whose", ["ours", "stock"])
@pytest.mark.parametrize("pooled", [True, False])
def test_install_is_enough_for_torchrecs_sharders_and_estimators(pooled, whose):
    module = planning.collection(pooled=pooled)
    sharder = SHARDERS[pooled, whose]({"optimizer": OptimType.FTRL})
    plain_module = planning.collection(pooled=pooled)
    plain_sharder = SHARDERS[pooled, whose](
        {"optimizer": OptimType.EXACT_SGD if whose == "ours" else EmbOptimType.EXACT_SGD}
    )
    torchrec_ext.install()
    found = planning.states_storage(
        module, sharder, (plain_module, plain_sharder), sharding_types=["table_wise"]
    )
    assert found[KEY] == [(0, 512_000)]


# The shards of 1000 x 64 on four ranks of two hosts, with column shards of 16.
SHARDS = {
    "table_wise": [(1000, 64)],
    "column_wise": [(1000, 16)] * 4,
    "table_column_wise": [(1000, 16)] * 4,
    "row_wise": [(250, 64)] * 4,
    "table_row_wise": [(500, 64)] * 2,
    "grid_shard": [(500, 16)] * 8,
}
LOCATIONS = {
    "fused": EmbeddingLocation.DEVICE,
    "fused_uvm": EmbeddingLocation.MANAGED,
    "fused_uvm_caching": EmbeddingLocation.MANAGED_CACHING,
}


@pytest.mark.parametrize("kernel", LOCATIONS)
@pytest.mark.parametrize("sharding_type", planning.SHARDING_TYPES)
@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (OptimType.FTRL, [False, False]),
        (OptimType.EXACT_ROWWISE_ADAGRAD, [True]),
        (OptimType.PARTIAL_ROWWISE_ADAM, [False, True]),
    ],
)
def test_states_count_per_shard_where_fbgemm_places_them(optimizer, states, sharding_type, kernel):
    def on_device_and_managed(rows: int, dim: int) -> tuple[int, int]:
        spec = (rows, dim, LOCATIONS[kernel], ComputeDevice.CUDA)
        splits = [construct_split_state([spec], rowwise, cacheable=False) for rowwise in states]
        return 4 * sum(s.dev_size for s in splits), 4 * sum(s.uvm_size for s in splits)

    module, sharder = _ours(optimizer, {}, "fused_params")
    found = planning.states_storage(
        module,
        sharder,
        _plain(),
        device="cuda",
        sharding_types=[sharding_type],
        kernels=[kernel],
    )
    expected = [on_device_and_managed(*shard) for shard in SHARDS[sharding_type]]
    assert found == {("t0", sharding_type, kernel): expected}


def test_a_row_wise_state_exists_once_per_column_shard_and_once_per_row():
    module, sharder = _ours(OptimType.EXACT_ROWWISE_ADAGRAD, {}, "fused_params")
    found = planning.states_storage(
        module, sharder, _plain(), sharding_types=planning.SHARDING_TYPES
    )
    assert {key[1]: sum(ddr for _, ddr in shards) for key, shards in found.items()} == {
        "table_wise": 4_000,
        "column_wise": 16_000,
        "table_column_wise": 16_000,
        "row_wise": 4_000,
        "table_row_wise": 4_000,
        "grid_shard": 16_000,
    }


NOT_OURS: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "fbgemm in fused_params": ({"optimizer": EmbOptimType.ADAM}, None),
    "torch.optim.Adam": (None, torch.optim.Adam),
    "torchrec.optim.RowWiseAdagrad": (None, torchrec.optim.RowWiseAdagrad),
    "a class beside ours": ({"optimizer": OptimType.FTRL, "l1_reg": 0.5}, torch.optim.Adagrad),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("case", NOT_OURS)
def test_tables_without_ours_keep_torchrecs_estimates(case, pooled, device):
    fused_params, cls = NOT_OURS[case]
    module = planning.collection(pooled=pooled)
    if cls is not None:
        planning.apply(module, cls)
    sharder = SHARDERS[pooled, "stock"](fused_params)
    before = planning.estimates_of(planning.options_of(module, sharder, device))
    torchrec_ext.install()
    after = planning.estimates_of(planning.options_of(module, sharder, device))
    assert len(before) > 1
    assert after == before


def test_a_table_of_fbgemms_beside_one_of_ours_keeps_its_estimates():
    names = ("t0", "t1")

    def estimates(first: Any) -> dict:
        module = planning.collection(names)
        planning.apply(module, first, "t0")
        planning.apply(module, torch.optim.Adam, "t1")
        sharder = SHARDERS[True, "stock"]()
        return planning.estimates_of(planning.options_of(module, sharder, "cuda"))

    before = estimates(torch.optim.SGD)
    torchrec_ext.install()
    after = estimates(optim.FTRL)
    for key in before:
        assert (after[key] == before[key]) == (key[0] == "t1")


def test_estimating_leaves_the_parameters_marks_alone():
    torchrec_ext.install()
    marked, unmarked = planning.collection(), planning.collection()
    planning.apply(marked, optim.FTRL, l1_reg=0.5)
    (parameter,) = marked.parameters()
    before = copy.copy(vars(parameter))
    planning.options_of(marked, SHARDERS[True, "ours"]())
    assert vars(parameter) == before
    planning.options_of(unmarked, SHARDERS[True, "ours"]({"optimizer": OptimType.FTRL}))
    (parameter,) = unmarked.parameters()
    assert "_optimizer_classes" not in vars(parameter)
    assert "_optimizer_kwargs" not in vars(parameter)


@pytest.mark.parametrize("estimator_type", [EmbeddingStorageEstimator, "subclass", "ours"])
def test_states_count_once_in_every_estimator(estimator_type):
    class OfTheUser(EmbeddingStorageEstimator):
        def estimate(self, sharding_options: Any, sharder_data_map: Any) -> None:
            super().estimate(sharding_options, sharder_data_map)

    types = {"subclass": OfTheUser, "ours": planner.EmbeddingStorageEstimator}
    module, sharder = _ours(OptimType.FTRL, {}, "class")
    if estimator_type == "ours":
        torchrec_ext.uninstall()

    def storages(module: Any, sharder: Any) -> int:
        estimator = types.get(estimator_type, EmbeddingStorageEstimator)(planning.topology())
        (option,) = planning.options_of(
            module, sharder, estimator=estimator, sharding_types=["table_wise"]
        )
        return option.total_storage.ddr

    assert storages(module, sharder) - storages(*_plain()) == 512_000


def test_inference_has_no_states():
    module, sharder = _ours(OptimType.FTRL, {}, "class")

    def estimates(module: Any, sharder: Any) -> list:
        estimators = [
            EmbeddingStorageEstimator(planning.topology(), is_inference=True),
            EmbeddingPerfEstimator(planning.topology(), is_inference=True),
        ]
        options = planning.options_of(module, sharder, estimator=estimators, kernels=["fused"])
        return sorted(planning.estimates_of(options).items())

    assert estimates(module, sharder) == estimates(*_plain())


def test_what_sharding_refuses_is_estimated_without_an_error():
    """The planner runs on one rank: an error there would leave the others waiting."""
    wrong = {"optimizer": OptimType.EXACT_SGD, "momentum": 0.0, "nesterov": True}
    found = planning.states_storage(
        planning.collection(), SHARDERS[True, "ours"](wrong), _plain(), sharding_types=KEY[1:2]
    )
    assert found == {KEY: [(0, 256_000)]}, "every state that the optimizer may have"
    module = planning.collection()
    planning.apply(module, optim.FTRL)
    planning.apply(module, torch.optim.SGD)
    sharder = SHARDERS[True, "stock"]()
    before = planning.estimates_of(planning.options_of(module, sharder))
    torchrec_ext.uninstall()
    assert planning.estimates_of(planning.options_of(module, sharder)) == before


def test_an_optimizer_in_the_keywords_of_a_class_of_torchrec_counts():
    """By its own hyperparameters: were they not legal, all states of Adam would count."""
    module = planning.collection()
    planning.apply(module, torchrec.optim.SGD, optimizer=OptimType.ADAM)
    inherited = {"optimizer": OptimType.FTRL, "learning_rate": 0.2}
    found = planning.states_storage(
        module, SHARDERS[True, "ours"](inherited), _plain(), sharding_types=KEY[1:2]
    )
    assert found == {KEY: [(0, 512_000)]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(("optimizer", "hyperparameters", "size"), BYTES)
def test_the_backward_pass_reads_and_writes_the_states_of_the_batchs_rows(
    optimizer, hyperparameters, size, pooled, device
):
    module, sharder = _ours(optimizer, hyperparameters, "class", pooled=pooled)
    limits = {"sharding_types": planning.SHARDING_TYPES, "kernels": ["fused"]}
    found = planning.estimates_of(planning.options_of(module, sharder, device, **limits))
    plain = planning.estimates_of(planning.options_of(*_plain(pooled), device, **limits))
    places = planning.topology(device)
    bandwidth = places.ddr_mem_bw if device == "cpu" else places.hbm_mem_bw
    # Every rank's batch has one lookup an example; a host or a rank has its share of them by rows.
    lookups = BATCH_SIZE * RANKS
    rows = dict.fromkeys(("table_wise", "column_wise", "table_column_wise"), lookups)
    rows |= {"row_wise": lookups / 4, "table_row_wise": lookups / 2, "grid_shard": lookups / 2}
    dims = {"column_wise": 16, "table_column_wise": 16, "grid_shard": 16}
    spec = spec_of(optimizer)
    states = spec.states_in_memory(spec.resolve(hyperparameters))
    assert sum(state.bytes_of(ROWS, DIM) for state in states) == size
    for (_, sharding_type, _), shards in found.items():
        row_bytes = sum(4 if s.rowwise else 4 * dims.get(sharding_type, DIM) for s in states)
        expected = 2 * rows[sharding_type] * row_bytes / bandwidth
        key = ("t0", sharding_type, "fused")
        for (_, perf), (_, other) in zip(shards, plain[key], strict=True):
            assert perf.bwd_compute - other.bwd_compute == pytest.approx(expected, rel=1e-9)
            perf.bwd_compute = other.bwd_compute
            assert perf == other


def test_both_perf_estimators_of_torchrec_count_the_states():
    module, sharder = _ours(OptimType.FTRL, {}, "fused_params")
    found = []
    for estimator_type in (EmbeddingPerfEstimator, ShardPerfEstimator):
        estimators = [
            estimator_type(planning.topology()),
            EmbeddingStorageEstimator(planning.topology()),
        ]
        limits = {"sharding_types": ["table_wise"], "estimator": estimators}
        options = [planning.options_of(*made, **limits) for made in ((module, sharder), _plain())]
        mine, plain = (option.shards[0].perf.bwd_compute for (option,) in options)
        found.append(mine - plain)
    moved = 2 * BATCH_SIZE * RANKS * 2 * DIM * 4 / planning.topology().ddr_mem_bw
    assert found == pytest.approx([moved, moved], rel=1e-9)


def test_a_batch_moves_no_more_states_than_a_shard_has():
    def backward(rows: int, optimizer: OptimType) -> float:
        module = planning.collection(rows=rows)
        sharder = SHARDERS[True, "ours"]({"optimizer": optimizer})
        (option,) = planning.options_of(module, sharder, sharding_types=["table_wise"])
        return option.shards[0].perf.bwd_compute

    bandwidth = planning.topology().ddr_mem_bw
    for rows, moved in ((16, 16), (ROWS, BATCH_SIZE * RANKS)):
        extra = backward(rows, OptimType.FTRL) - backward(rows, OptimType.EXACT_SGD)
        assert extra == pytest.approx(2 * moved * 2 * DIM * 4 / bandwidth, rel=1e-9)
