"""``drop_bad_indices``: a batch with bad lookups is as the batch without them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from .modules import HYPERPARAMETERS, assert_same_bits, fill, make_module, random_tables, snapshot

SHAPES = [(7, 8), (1, 8), (40, 8)]
FEATURES = [0, 1, 1, 2]
MODES = ("FATAL", "WARNING", "IGNORE", "NONE")
BAD = (-1, -2, -(2**31), 10**9, 2**31 - 1)  # beside the number of rows of the feature's table
BAGS = 6
SIZES = [[3, 1, 2], [0, 4, 1], [8, 0, 1], [1, 1, 1]]  # 6, 5, 9 and 3 bags


def _batches(
    dtype: torch.dtype, share: float = 0.3, bags_of: Sequence[int] = (BAGS,) * len(FEATURES)
) -> tuple[list[Tensor], Tensor]:
    """Indices, offsets and weights with bad lookups and without them; which are good."""
    rows = torch.tensor([SHAPES[table][0] for table in FEATURES])
    rows = rows.repeat_interleave(torch.tensor(bags_of))
    lengths = torch.randint(0, 4, (sum(bags_of),))
    limits = rows.repeat_interleave(lengths)
    indices = (torch.rand(limits.shape) * limits).long()
    good = torch.rand(limits.shape) >= share
    bad = torch.tensor([*BAD, 0])[torch.randint(0, len(BAD) + 1, limits.shape)]
    bad = torch.where(bad == 0, limits, bad)
    bags = torch.arange(lengths.numel()).repeat_interleave(lengths)
    kept = torch.zeros_like(lengths).index_add(0, bags[good], torch.ones_like(bags[good]))
    weights = torch.randn(limits.shape)
    zero = torch.zeros(1, dtype=torch.int64)
    parts = [
        torch.where(good, indices, bad).to(dtype),
        torch.cat([zero, lengths.cumsum(0)]).to(dtype),
        weights,
        indices[good].to(dtype),
        torch.cat([zero, kept.cumsum(0)]).to(dtype),
        weights[good],
    ]
    return parts, good


def _modules(optimizer: OptimType, pooling: str, mode: str, **keywords):
    """The module under test, and one of the same content that must not see a bad index."""
    start = random_tables(SHAPES)
    modules = []
    for drops, each in ((True, mode), (False, "FATAL")):
        module = make_module(
            optimizer,
            SHAPES,
            pooling,
            feature_table_map=FEATURES,
            bounds_check_mode=BoundsCheckMode[each],
            drop_bad_indices=drops,
            **keywords,
        )
        fill(module, start)
        modules.append(module)
    return modules


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["sum", "mean", "sum weighted", "mean weighted", "none"])
@pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
def test_equals_the_batch_without_them(optimizer, case, mode) -> None:
    pooling, weighted = case.split()[0], "weighted" in case
    module, clean = _modules(optimizer, pooling, mode, **HYPERPARAMETERS[optimizer])
    for dtype in (torch.int64, torch.int32):
        (indices, offsets, weights, good_indices, good_offsets, good_weights), good = _batches(
            dtype
        )
        weights.requires_grad_(weighted)
        good_weights = good_weights.detach().requires_grad_(weighted)
        given = indices.clone()
        output = module(indices, offsets, weights if weighted else None)
        expected = clean(good_indices, good_offsets, good_weights if weighted else None)
        assert torch.equal(indices, given), "the caller's batch is left alone"
        gradient = torch.randn_like(output)
        if pooling == "none":
            assert output.shape == (len(indices), 8)
            assert torch.equal(output[good], expected) and not output[~good].any()
            expected.backward(gradient[good])
        else:
            assert torch.equal(output, expected)
            expected.backward(gradient)
        output.backward(gradient)
        if weighted:
            assert torch.equal(weights.grad[good], good_weights.grad)
            assert not good.all() and not weights.grad[~good].any()
        assert_same_bits(snapshot(module), snapshot(clean))


@pytest.mark.parametrize("case", ["sum", "mean", "sum weighted", "mean weighted"])
def test_variable_batch_sizes(case) -> None:
    pooling, weighted = case.split()[0], "weighted" in case
    module, clean = _modules(OptimType.FTRL, pooling, "WARNING", **HYPERPARAMETERS[OptimType.FTRL])
    (indices, offsets, weights, good_indices, good_offsets, good_weights), good = _batches(
        torch.int64, bags_of=[sum(sizes) for sizes in SIZES]
    )
    sizes = {"batch_size_per_feature_per_rank": SIZES}
    weights.requires_grad_(weighted)
    output = module(indices, offsets, weights if weighted else None, **sizes)
    expected = clean(good_indices, good_offsets, good_weights if weighted else None, **sizes)
    assert torch.equal(output, expected)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    expected.backward(gradient)
    assert_same_bits(snapshot(module), snapshot(clean))
    if weighted:
        assert weights.grad[good].any() and not weights.grad[~good].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["none bad", "all bad"])
def test_nothing_and_everything_bad(share, pooling, mode) -> None:
    module, _ = _modules(OptimType.FTRL, pooling, mode, **HYPERPARAMETERS[OptimType.FTRL])
    (indices, offsets, *_), good = _batches(torch.int64, share)
    assert bool(good.all()) == (share == 0.0) and bool(good.any()) == (share == 0.0)
    before = snapshot(module)
    output = module(indices, offsets)
    output.sum().backward()
    changed = any(not torch.equal(a, b) for a, b in zip(before, snapshot(module), strict=True))
    assert bool(output.any()) == changed == (share == 0.0)
    assert int(module.iter) == 1, "the step counts whatever the batch held"


def test_no_lookups_at_all() -> None:
    for pooling, shape in (("sum", (BAGS, 32)), ("none", (0, 8))):
        module, _ = _modules(OptimType.FTRL, pooling, "FATAL", **HYPERPARAMETERS[OptimType.FTRL])
        before = snapshot(module)
        offsets = torch.zeros(len(FEATURES) * BAGS + 1, dtype=torch.int64)
        output = module(torch.zeros(0, dtype=torch.int64), offsets)
        output.sum().backward()
        assert output.shape == shape
        assert_same_bits(before, snapshot(module))


def test_sleeping_rows_are_not_woken() -> None:
    settings = {**HYPERPARAMETERS[OptimType.ADAM], "sparse_mode": "dense"}
    module, clean = _modules(OptimType.ADAM, "mean", "IGNORE", **settings)
    for _ in range(4):
        (indices, offsets, _, good_indices, good_offsets, _), _ = _batches(torch.int64)
        module(indices, offsets).sum().backward()
        clean(good_indices, good_offsets).sum().backward()
        assert torch.equal(module._sleeping.row_steps, clean._sleeping.row_steps)
    assert_same_bits(snapshot(module), snapshot(clean))


def test_a_table_without_rows_drops_every_lookup() -> None:
    module = make_module(OptimType.FTRL, [(0, 4), (3, 4)], drop_bad_indices=True)
    fill(module, [torch.zeros(0, 4), torch.ones(3, 4)])
    output = module(torch.tensor([0, 5, 1]), torch.tensor([0, 2, 3]))
    assert output.tolist() == [[0.0] * 4 + [1.0] * 4]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_other_values_are_refused(value) -> None:
    with pytest.raises(ValueError, match=rf"tables \['0'\]: drop_bad_indices={value!r}"):
        make_module(OptimType.FTRL, [(3, 4)], drop_bad_indices=value)


def test_offsets_that_no_bag_can_have_are_refused() -> None:
    module = make_module(OptimType.FTRL, [(3, 4)], drop_bad_indices=True, table_names=["user"])
    with pytest.raises(ValueError, match=r"\['user'\]: offsets must not descend.*\[2, 1\]: bag 1"):
        module(torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2]))
    with pytest.raises(ValueError, match="end at the number of indices, 2, but are 0 and 1"):
        module(torch.tensor([1, 2]), torch.tensor([0, 0, 1]))


def test_refused_on_cuda_before_anything_is_allocated() -> None:
    table = (3, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    with pytest.raises(ValueError, match=r"\['0'\]: drop_bad_indices=True runs on the CPU only"):
        TableBatchedEmbeddingBags([table], optimizer=OptimType.FTRL, drop_bad_indices=True)
