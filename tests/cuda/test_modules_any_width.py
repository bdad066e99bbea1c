"""Modules on CUDA of which a table's dim is no multiple of 4: their lookup is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from torchrec_ext import OptimType, any_width, ops
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from ..modules import (
    CASES,
    HYPERPARAMETERS,
    assert_same_bits,
    fill,
    make_module,
    random_batch,
    random_tables,
    run_forward,
    snapshot,
)
from ..reference import Batch
from . import kernels
from .test_modules import as_on_a_device

SHAPES = [(7, 3), (1, 64), (12, 1), (40, 21)]
EXAMPLES = 6
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)


@pytest.fixture(autouse=True)
def shim():
    kernels.load()
    with kernels.in_place_of_the_cpu_kernels():
        yield


@pytest.fixture(autouse=True)
def lookups(monkeypatch) -> list[int]:
    """The pooling mode of every call of our lookup."""
    calls: list[int] = []
    original = ops.lookup

    def lookup(*arguments: Any, **keywords: Any) -> None:
        calls.append(keywords["pooling_mode"])
        original(*arguments, **keywords)

    monkeypatch.setattr(ops, "lookup", lookup)
    return calls


def _pair(
    optimizer: OptimType, shapes: list[tuple[int, int]] = SHAPES, **keywords: Any
) -> tuple[TableBatchedEmbeddingBags, TableBatchedEmbeddingBags]:
    """The same module as on a device and on the CPU."""
    modules = [
        make_module(optimizer, shapes, **{**HYPERPARAMETERS[optimizer], **keywords})
        for _ in range(2)
    ]
    tables = random_tables(shapes)
    for module in modules:
        fill(module, tables)
    return as_on_a_device(modules[0]), modules[1]


def _step(
    pair: tuple[TableBatchedEmbeddingBags, TableBatchedEmbeddingBags], batch: Batch, **keywords: Any
) -> None:
    """A step of both, which must see the same and then have the same bits."""
    outputs, weights = [], []
    for module in pair:
        given = None if batch.weights is None else batch.weights.clone().requires_grad_()
        with kernels.those_of(module):
            outputs.append(module(batch.indices.clone(), batch.offsets.clone(), given, **keywords))
        weights.append(given)
    found, expected = outputs
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = 1e-5 if found.dtype == torch.float32 else 2**-10
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    gradient = torch.randn(found.shape).to(found.dtype)
    for module, output in zip(pair, outputs, strict=True):
        with kernels.those_of(module):
            output.backward(gradient)
    assert_same_bits(_values(pair[0]), _values(pair[1]))
    if batch.weights is not None:
        assert_same_bits([weights[0].grad], [weights[1].grad])


def _values(module: TableBatchedEmbeddingBags) -> list[Tensor]:
    """Weights and states, read from the buffer on the host."""
    prefixes = ["weights", *(state.name for state in module._states)]
    return [getattr(module, f"{prefix}_host").detach() for prefix in prefixes]


@OPTIMIZERS
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_trains_with_the_cpus_bits(optimizer, pooling, lookups) -> None:
    shapes = SHAPES if pooling != "none" else [(7, 3), (40, 3)]
    pair = _pair(optimizer, shapes, pooling=pooling)
    rows = [rows for rows, _ in shapes]
    for _ in range(3):
        _step(pair, random_batch(rows, EXAMPLES, 5, weighted=pooling != "none"))
    assert lookups == [int(pair[0].pooling_mode)] * 3
    assert int(pair[0].iter) == pair[0].step == 3


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("FTRL-")])
@pytest.mark.parametrize("shapes", [SHAPES, [(7, 133), (9, 260), (3, 1)]], ids=["narrow", "wide"])
def test_ftrls_extensions_under_new_hyperparameters_and_after_a_reset(name, shapes) -> None:
    """Rows that were never updated, some again; `l21_reg` leaves some of its rows at zero."""
    _, given = CASES[name]
    pair = _pair(OptimType.FTRL, shapes, **given)
    for step in range(4):
        if step == 2:
            for module in pair:
                module.set_learning_rate(0.05)
                module.update_hyper_parameters({"l21_reg": 1000.0 * given.get("l21_reg", 0.0)})
                module.reset_optimizer_states(0, [0, 2])
        _step(pair, random_batch([rows for rows, _ in shapes], EXAMPLES, 5))
    zero = torch.cat([(table == 0.0).all(1) for table in pair[1].split_embedding_weights()])
    assert ("l21_reg" in given) == bool(zero.any()) and not bool(zero.all())


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("output", [SparseType.FP32, SparseType.FP16])
def test_dtypes_of_weights_and_output(precision, output) -> None:
    pair = _pair(OptimType.ADAM, weights_precision=precision, output_dtype=output)
    _step(pair, random_batch([rows for rows, _ in SHAPES], EXAMPLES, 5))


def test_an_output_in_bfloat16() -> None:
    """FBGEMM's lookup on the CPU has none."""
    module, _ = _pair(OptimType.ADAM, output_dtype=SparseType.BF16)
    like = make_module(OptimType.ADAM, SHAPES, **HYPERPARAMETERS[OptimType.ADAM])
    fill(like, [table.clone() for table in module.split_embedding_weights()])
    batch = random_batch([rows for rows, _ in SHAPES], EXAMPLES, 5)
    found, expected = run_forward(module, batch), run_forward(like, batch)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-5)
    gradient = torch.randn(found.shape).bfloat16()
    found.backward(gradient)
    with kernels.those_of(like):
        expected.backward(gradient.float())
    assert_same_bits(_values(module), _values(like))


def test_shared_tables_and_int32_indices() -> None:
    pair = _pair(OptimType.FTRL, SHAPES[:2], feature_table_map=[0, 1, 0])
    _step(pair, random_batch([7, 1, 7], EXAMPLES, 5, index_dtype=torch.int32))


def test_variable_batch_sizes(lookups) -> None:
    module, like = _pair(OptimType.LAMB)
    sizes = [[3, 1], [0, 2], [5, 5], [1, 0]]
    lengths = torch.randint(0, 5, (sum(map(sum, sizes)),))
    counts = [int(each.sum()) for each in lengths.split([sum(each) for each in sizes])]
    indices = [torch.randint(0, n, (k,)) for (n, _), k in zip(SHAPES, counts, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    batch = Batch(torch.cat(indices), offsets, torch.randn(sum(counts)))
    _step((module, like), batch, batch_size_per_feature_per_rank=sizes)
    assert lookups == [ops.POOLING_SUM]


def test_fbgemm_checks_bounds_before() -> None:
    """In this mode it lets bad indices read row 0."""
    pair = _pair(OptimType.EXACT_SGD, bounds_check_mode=BoundsCheckMode.IGNORE)
    batch = random_batch([rows for rows, _ in SHAPES], EXAMPLES, 5)
    batch.indices[::3] = 99
    _step(pair, batch)


def test_state_dicts_and_views() -> None:
    module, like = _pair(OptimType.ADAM)
    _step((module, like), random_batch([rows for rows, _ in SHAPES], EXAMPLES, 5))
    views = [state for table in module.split_optimizer_states() for state in table]
    assert_same_bits(views, snapshot(like)[len(SHAPES) :])


def test_a_batch_of_no_examples() -> None:
    module, _ = _pair(OptimType.FTRL)
    nothing = torch.zeros(0, dtype=torch.int64)
    before = [value.clone() for value in _values(module)]
    output = module(nothing, torch.zeros(1, dtype=torch.int64))
    assert output.shape == (0, sum(dim for _, dim in SHAPES))
    output.sum().backward()
    assert_same_bits(_values(module), before)


def test_multiples_of_4_alone_are_looked_up_by_fbgemm(lookups) -> None:
    pair = _pair(OptimType.FTRL, [(7, 4), (5, 8)])
    _step(pair, random_batch([7, 5], EXAMPLES, 5))
    assert lookups == []


def test_the_layout_in_a_devices_memory() -> None:
    at = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    specs = [(7, 3, *at), (5, 8, *at), (2, 1, *at)]
    split = any_width.construct_split_state(specs, rowwise=False, cacheable=True)
    assert (split.dev_size, split.host_size, split.uvm_size) == (63, 0, 0)
    assert split.offsets == [0, 21, 61]
    assert split.placements == [EmbeddingLocation.DEVICE] * 3
    rowwise = any_width.construct_split_state(specs, rowwise=True, cacheable=False)
    assert (rowwise.dev_size, rowwise.offsets) == (14, [0, 7, 12])


def test_an_fbgemm_that_looks_up_elsewhere_is_named(monkeypatch) -> None:
    module, _ = _pair(OptimType.FTRL)

    def forward(self, indices, offsets, *others, **keywords):
        raise AssertionError("never called")

    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "forward", forward)
    batch = random_batch([rows for rows, _ in SHAPES], EXAMPLES, 5)
    with pytest.raises(RuntimeError, match=r"dims \[1, 3, 21\] are no multiples of 4.*looks up"):
        run_forward(module, batch)
