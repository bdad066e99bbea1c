"""Features with different batch sizes (VBE)."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from torchrec_ext import OptimType, ops

from . import reference
from .distributed.ranks import run_on_ranks
from .modules import (
    HYPERPARAMETERS,
    assert_same_bits,
    fill,
    make_module,
    random_tables,
    relative_error,
    snapshot,
)

SHAPES = [(7, 4), (12, 8), (40, 20)]
FEATURE_TABLES = [0, 1, 1, 2]
DIMS = [SHAPES[table][1] for table in FEATURE_TABLES]
SIZES = [[3, 1, 0], [0, 2, 2], [5, 5, 1], [1, 0, 4]]  # [feature][rank]
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)


def _batch(longest: int = 5) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Indices, offsets, and the lengths of every feature."""
    lengths = [torch.randint(0, longest + 1, (sum(each),)) for each in SIZES]
    indices = [
        torch.randint(0, SHAPES[table][0], (int(each.sum()),))
        for table, each in zip(FEATURE_TABLES, lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return torch.cat(indices), offsets, lengths


def _blocks(flat: Tensor) -> list[Tensor]:
    """The blocks ``[examples, dim]`` of a flat output, put together for every feature."""
    ranks = len(SIZES[0])
    sizes = [SIZES[f][r] * DIMS[f] for r in range(ranks) for f in range(len(SIZES))]
    parts = flat.split(sizes)
    return [
        torch.cat([parts[r * len(SIZES) + f].view(-1, DIMS[f]) for r in range(ranks)])
        for f in range(len(SIZES))
    ]


def _padded(parts: list[Tensor], examples: int) -> list[Tensor]:
    """Appends zeros for the examples that a feature has not."""
    return [torch.cat([p, p.new_zeros(examples - p.shape[0], *p.shape[1:])]) for p in parts]


@OPTIMIZERS
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_float64_reference(optimizer, pooling, weighted) -> None:
    module = make_module(
        optimizer, SHAPES, pooling, feature_table_map=FEATURE_TABLES, **HYPERPARAMETERS[optimizer]
    )
    start = random_tables(SHAPES)
    fill(module, start)
    tables = [table.double() for table in start]
    states = [[state.double() for state in table] for table in module.split_optimizer_states()]
    for step in range(1, 4):
        indices, offsets, lengths = _batch()
        weights = torch.randn(indices.numel()) if weighted else None
        output = module(indices, offsets, weights, batch_size_per_feature_per_rank=SIZES)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        # Bags of no lookups make the batch sizes of all features the same.
        examples = max(each.numel() for each in lengths)
        ends = torch.stack(_padded(lengths, examples)).flatten().cumsum(0)
        same_sizes = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        batch = reference.Batch(indices, same_sizes, weights, pooling)
        expected = reference.lookup(tables, FEATURE_TABLES, batch).split(DIMS, dim=1)
        for found, each in zip(_blocks(output.detach()), expected, strict=True):
            assert relative_error(found, each[: found.shape[0]]) <= 2e-5
        reference.train_step(
            reference.UPDATES[optimizer.name],
            tables,
            states,
            FEATURE_TABLES,
            batch,
            torch.cat(_padded(_blocks(gradient), examples), dim=1),
            step,
            **HYPERPARAMETERS[optimizer],
        )
        for found, each in zip(module.split_embedding_weights(), tables, strict=True):
            assert relative_error(found, each) <= 2e-5


def _look_up_with(dtype: torch.dtype) -> None:
    """Looks up often enough for the allocator to notice what is written out of bounds."""
    sizes = [[2, 1], [0, 0], [3, 4]]
    for _ in range(30):
        module = make_module(OptimType.EXACT_SGD, [(5, 4), (7, 8)], feature_table_map=[1, 0, 1])
        offsets = torch.cat([torch.zeros(1), torch.randint(0, 4, (10,)).cumsum(0)]).to(dtype)
        indices = torch.randint(0, 5, (int(offsets[-1]),), dtype=dtype)
        for _ in range(5):
            module(indices, offsets, batch_size_per_feature_per_rank=sizes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lookups_stay_inside_their_memory(dtype) -> None:
    """FBGEMM's CPU lookup writes int64 offsets into memory for int32 ones."""
    run_on_ranks(1, _look_up_with, dtype)


def test_trains_as_fbgemms_sgd() -> None:
    ours = make_module(
        OptimType.EXACT_SGD, SHAPES, feature_table_map=FEATURE_TABLES, learning_rate=0.1
    )
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in SHAPES],
        feature_table_map=FEATURE_TABLES,
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.1,
    )
    tables = random_tables(SHAPES)
    for module in (ours, theirs):
        fill(module, tables)
    for _ in range(3):
        indices, offsets, _ = _batch()
        outputs = [
            module(indices.clone(), offsets, batch_size_per_feature_per_rank=SIZES)
            for module in (ours, theirs)
        ]
        assert relative_error(outputs[0].detach(), outputs[1].detach()) <= 1e-6
        gradient = torch.randn_like(outputs[0])
        for output in outputs:
            output.backward(gradient)
    for mine, other in zip(
        ours.split_embedding_weights(), theirs.split_embedding_weights(), strict=True
    ):
        assert relative_error(mine, other) <= 1e-6


@OPTIMIZERS
def test_equal_batch_sizes_give_the_same_bits(optimizer) -> None:
    modules = [
        make_module(
            optimizer, SHAPES, feature_table_map=FEATURE_TABLES, **HYPERPARAMETERS[optimizer]
        )
        for _ in range(2)
    ]
    tables = random_tables(SHAPES)
    lengths = torch.randint(0, 5, (4, 6))
    indices = torch.cat(
        [
            torch.randint(0, SHAPES[table][0], (int(each.sum()),))
            for table, each in zip(FEATURE_TABLES, lengths, strict=True)
        ]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    gradient = torch.randn(6, sum(DIMS))
    for module in modules:
        fill(module, tables)
    modules[0](indices, offsets).backward(gradient)
    flat = torch.cat([block.flatten() for block in gradient.split(DIMS, dim=1)])
    modules[1](indices, offsets, batch_size_per_feature_per_rank=[[6]] * 4).backward(flat)
    assert_same_bits(snapshot(modules[0]), snapshot(modules[1]))


def test_sleeping_rows_are_caught_up() -> None:
    """In dense mode, bags of no lookups that even the batch sizes out change nothing."""
    modules = [
        make_module(
            OptimType.ADAM,
            SHAPES,
            feature_table_map=FEATURE_TABLES,
            learning_rate=0.1,
            weight_decay=0.1,
            sparse_mode="dense",
        )
        for _ in range(2)
    ]
    tables = random_tables(SHAPES)
    for module in modules:
        fill(module, tables)
    for _ in range(4):
        indices, offsets, lengths = _batch(longest=1)
        output = modules[0](indices, offsets, batch_size_per_feature_per_rank=SIZES)
        gradient = torch.randn_like(output)
        output.backward(gradient)
        examples = max(each.numel() for each in lengths)
        padded, blocks = _padded(lengths, examples), _padded(_blocks(gradient), examples)
        ends = torch.stack(padded).flatten().cumsum(0)
        same_sizes = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        modules[1](indices, same_sizes).backward(torch.cat(blocks, dim=1))
    assert_same_bits(snapshot(modules[0]), snapshot(modules[1]))


def _arguments(**changes):
    """A good call of the op: one table, two features of one and two bags."""
    batch = {
        "feature_bags": torch.tensor([0, 1, 3]),
        "gradient_offsets": torch.tensor([0, 4, 8]),
    }
    return {
        "grad_output": torch.ones(12),
        "weights": torch.zeros(12),
        "states": [],
        "table_layout": torch.tensor([[3, 4, 0]]),
        "feature_table_map": torch.tensor([0, 0]),
        "indices": torch.tensor([0, 1, 2]),
        "offsets": torch.tensor([0, 1, 2, 3]),
        "per_sample_weights": None,
        "pooling_mode": ops.POOLING_SUM,
        "optimizer": OptimType.EXACT_SGD,
        "hyperparameters": [1.0, 0.0, 0.0, 0.0, 0.0],
        "variable_batch": ops.VariableBatch(**{**batch, **changes}),
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"feature_bags": torch.tensor([0, 3])}, "feature_bags has 2 elements for 3"),
        ({"feature_bags": torch.tensor([0, 4, 3])}, "feature_bags of feature 1 run from 4 to 3"),
        ({"feature_bags": torch.tensor([0, 1, 2])}, "must start at 0 and end at 3"),
        ({"feature_bags": torch.tensor([0, 1, 3]).int()}, "feature_bags has the wrong dtype"),
        ({"gradient_offsets": torch.tensor([0, 4])}, "gradient_offsets has 2 elements for 3 bags"),
        ({"gradient_offsets": torch.tensor([0, 4, 9])}, "bag 2 begins at element 9 of 12"),
        ({"gradient_offsets": torch.tensor([-4, 4, 8])}, "bag 0 begins at element -4"),
    ],
)
def test_bad_arguments_change_nothing(changes, message) -> None:
    arguments = _arguments(**changes)
    with pytest.raises(RuntimeError, match=message):
        ops.fused_update(**arguments)
    assert arguments["weights"].count_nonzero() == 0


def test_good_arguments_are_good() -> None:
    arguments = _arguments()
    ops.fused_update(**arguments)
    assert arguments["weights"].tolist() == [-1.0] * 12
