"""Tables of any width, every optimizer: FBGEMM's own modules take multiples of 4 only."""

from __future__ import annotations

import copy

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from .. import reference
from ..modules import (
    HYPERPARAMETERS,
    assert_same_bits,
    fill,
    make_module,
    random_batch,
    random_tables,
    relative_error,
    run_forward,
    snapshot,
)

OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
WIDTHS = (1, 2, 3, 5, 6, 7, 9)
# All widths, one that is summed in several parts, a single element and a table without rows.
MIXED = [(8, dim) for dim in WIDTHS] + [(3, 131), (1, 1), (0, 5), (4, 8)]
SHARED = [1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 6]
# Adam's first steps divide the gradient by its own size; see test_contract.py.
TOLERANCES = {OptimType.ADAM: 2e-4, OptimType.LAMB: 2e-4}


def _train_beside_reference(
    optimizer: OptimType,
    shapes: list[tuple[int, int]],
    feature_tables: list[int],
    pooling: str,
    weighted: bool = False,
    **keywords,
) -> None:
    hyperparameters = {**HYPERPARAMETERS[optimizer], **keywords}
    module = make_module(
        optimizer, shapes, pooling, feature_table_map=feature_tables, **hyperparameters
    )
    start = random_tables(shapes)
    fill(module, start)
    assert [tuple(weight.shape) for weight in module.split_embedding_weights()] == shapes
    tables = [table.double() for table in start]
    states = [[state.double() for state in table] for table in module.split_optimizer_states()]
    rows = [shapes[table][0] for table in feature_tables]
    for step in range(1, 5):
        batch = random_batch(rows, 6, 5, pooling=pooling, weighted=weighted)
        output = run_forward(module, batch)
        expected = reference.lookup(tables, feature_tables, batch)
        assert output.shape == expected.shape
        assert relative_error(output.detach(), expected) <= 2e-5
        gradient = torch.randn_like(output)
        output.backward(gradient)
        reference.train_step(
            reference.UPDATES[optimizer.name],
            tables,
            states,
            feature_tables,
            batch,
            gradient,
            step,
            **hyperparameters,
        )
        tolerance = TOLERANCES.get(optimizer, 2e-5)
        found = [*module.split_embedding_weights(), *sum(module.split_optimizer_states(), [])]
        for mine, exact in zip(found, [*tables, *sum(states, [])], strict=True):
            assert relative_error(mine, exact) <= tolerance


@OPTIMIZERS
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_mixed_widths_equal_the_float64_reference(optimizer, pooling, weighted) -> None:
    _train_beside_reference(optimizer, MIXED, SHARED, pooling, weighted)


@OPTIMIZERS
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_one_width_equals_the_float64_reference(optimizer, dim, pooling) -> None:
    _train_beside_reference(optimizer, [(7, dim), (1, dim), (12, dim)], [0, 1, 0, 2], pooling)


@OPTIMIZERS
def test_tables_are_stored_at_their_width(optimizer) -> None:
    """One behind the other, without padding, weights and states alike."""
    module = make_module(optimizer, MIXED, feature_table_map=SHARED, **HYPERPARAMETERS[optimizer])
    elements, rows = sum(n * dim for n, dim in MIXED), sum(n for n, _ in MIXED)
    assert module.weights_host.numel() == elements
    for state, buffer in zip(module._states, module._state_buffers(), strict=True):
        assert buffer.numel() == (rows if state.rowwise else elements)
    ends = torch.tensor([n * dim for n, dim in MIXED]).cumsum(0).tolist()
    assert module.weights_physical_offsets == [0, *ends[:-1]]


@pytest.mark.parametrize(
    ("optimizer", "keywords"),
    [
        (OptimType.ADAM, {"bias_correction": "per_row"}),
        (OptimType.EXACT_SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ],
)
def test_variants_with_other_states_equal_the_float64_reference(optimizer, keywords) -> None:
    _train_beside_reference(optimizer, MIXED, SHARED, "sum", **keywords)


@OPTIMIZERS
def test_variable_batch_sizes_give_the_bits_of_a_padded_batch(optimizer) -> None:
    features = [table for table in SHARED if MIXED[table][0] > 0]
    dims = [MIXED[table][1] for table in features]
    shapes = [MIXED[table] for table in sorted(set(features))]
    features = [shapes.index(MIXED[table]) for table in features]
    modules = [
        make_module(optimizer, shapes, feature_table_map=features, **HYPERPARAMETERS[optimizer])
        for _ in range(2)
    ]
    start = random_tables(shapes)
    for module in modules:
        fill(module, start)
    sizes = [[f % 3, (2 * f + 1) % 4] for f in range(len(features))]
    longest = max(sum(each) for each in sizes)
    for _ in range(3):
        lengths = [torch.randint(0, 4, (sum(each),)) for each in sizes]
        indices = torch.cat(
            [
                torch.randint(0, shapes[table][0], (int(each.sum()),))
                for table, each in zip(features, lengths, strict=True)
            ]
        )
        padded = torch.stack([torch.cat([k, k.new_zeros(longest - len(k))]) for k in lengths])
        ends = [
            torch.cat([k.new_zeros(1), k.cumsum(0)]) for k in (torch.cat(lengths), padded.flatten())
        ]
        flat = modules[0](indices, ends[0], batch_size_per_feature_per_rank=sizes)
        whole = modules[1](indices, ends[1])
        # Rank by rank and feature by feature, the examples that there are.
        columns = whole.split(dims, dim=1)
        present = [
            columns[f][first : first + count]
            for rank in range(2)
            for f, each in enumerate(sizes)
            for first, count in [(sum(each[:rank]), each[rank])]
        ]
        expected = torch.cat([block.flatten() for block in present])
        assert torch.equal(flat, expected)
        gradient = torch.randn_like(flat)
        flat.backward(gradient)
        expected.backward(gradient)
    assert_same_bits(snapshot(modules[0]), snapshot(modules[1]))


@pytest.mark.parametrize("dim", WIDTHS)
def test_sleeping_rows_move_as_torchs_dense_adamw_moves_them(dim) -> None:
    module = make_module(
        OptimType.ADAM, [(20, dim)], learning_rate=0.01, weight_decay=0.1, sparse_mode="dense"
    )
    start = torch.randn(20, dim)
    fill(module, [start])
    exact = start.double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], lr=0.01, weight_decay=0.1)
    for _ in range(40):
        indices = torch.randint(0, 20, (3,))
        output = module(indices, torch.arange(4))
        assert relative_error(output.detach(), exact.detach()[indices]) <= 1e-5
        gradient = torch.randn_like(output)
        output.backward(gradient)
        exact.grad = torch.zeros_like(exact).index_add_(0, indices, gradient.double())
        optimizer.step()
    assert relative_error(module.split_embedding_weights()[0], exact.detach()) <= 1e-5


@pytest.mark.parametrize("precision", [SparseType.FP32, SparseType.FP16], ids=str)
@pytest.mark.parametrize("output_dtype", [SparseType.FP32, SparseType.FP16], ids=str)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_lookups_of_every_dtype(precision, output_dtype, pooling) -> None:
    shapes = MIXED if pooling != "none" else [(7, 5), (9, 5)]
    features = SHARED if pooling != "none" else [1, 0, 1]
    module = make_module(
        OptimType.FTRL,
        shapes,
        pooling,
        feature_table_map=features,
        weights_precision=precision,
        output_dtype=output_dtype,
    )
    start = random_tables(shapes)
    fill(module, start)
    weighted = pooling == "sum"  # FBGEMM gives a weighted mean in float16 the sum, for every dim
    batch = random_batch([shapes[t][0] for t in features], 9, 7, pooling=pooling, weighted=weighted)
    output = run_forward(module, batch).detach()
    assert output.dtype == output_dtype.as_dtype()
    expected = reference.lookup([table.double() for table in start], features, batch)
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3}[output.dtype]
    assert relative_error(output, expected) <= tolerance


@OPTIMIZERS
def test_copies_and_state_dicts(optimizer) -> None:
    def make() -> TableBatchedEmbeddingBags:
        return make_module(optimizer, MIXED, feature_table_map=SHARED, **HYPERPARAMETERS[optimizer])

    module, loaded = make(), make()
    fill(module, random_tables(MIXED))
    batch = random_batch([MIXED[table][0] for table in SHARED], 6, 5)
    run_forward(module, batch).sum().backward()
    copied = copy.deepcopy(module)
    loaded.load_state_dict(module.state_dict())
    for each in (module, copied, loaded):
        run_forward(each, batch).square().sum().backward()
    assert_same_bits(snapshot(module), snapshot(copied))
    assert_same_bits(snapshot(module), snapshot(loaded))


@pytest.mark.parametrize("dim", WIDTHS)
def test_fbgemms_own_optimizers_keep_its_error(dim) -> None:
    make_module(OptimType.FTRL, [(3, dim)])
    with pytest.raises(AssertionError, match=f"multiple of 4, but got {dim}"):
        SplitTableBatchedEmbeddingBagsCodegen(
            [(3, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
        )


def test_an_fbgemm_that_lays_out_its_weights_elsewhere_is_named(monkeypatch) -> None:
    def constructor(self, embedding_specs, feature_table_map=None, **keywords):
        raise AssertionError("never called")

    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "__init__", constructor)
    with pytest.raises(RuntimeError, match=r"dims \[3\] are no multiples of 4.*FBGEMM 1"):
        make_module(OptimType.FTRL, [(3, 3), (4, 8)])
