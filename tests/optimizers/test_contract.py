"""Every registered optimizer, through one suite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_ext import _C, OptimType
from torchrec_ext.optimizers import SPECS
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from .. import reference
from ..modules import (
    CASES,
    HALF,
    HYPERPARAMETERS,
    assert_same_bits,
    fill,
    make_module,
    of_update,
    random_batch,
    random_tables,
    relative_error,
    run_forward,
    snapshot,
)

OPTIMIZERS = pytest.mark.parametrize("case", CASES)
SHAPES = [(7, 4), (1, 64), (12, 8), (40, 20), (9, 1), (6, 7)]
FEATURE_TABLES = [0, 1, 0, 2, 3, 3, 4, 5, 4]
ROWS = [SHAPES[table][0] for table in FEATURE_TABLES]
CAPABILITIES = ("default", "avx2", "avx512")
# Adam's first steps divide the gradient by its own size: what a float32 sum of lookups lost where
# they cancel comes out in full.
TOLERANCES = {OptimType.ADAM: 2e-4, OptimType.LAMB: 2e-4}


def test_every_optimizer_has_spec_reference_and_hyperparameters() -> None:
    assert set(SPECS) == set(OptimType) == set(HYPERPARAMETERS)
    assert set(reference.UPDATES) == {optimizer.name for optimizer in OptimType}


def _module(case: str, pooling: str = "sum", **keywords) -> TableBatchedEmbeddingBags:
    optimizer, given = CASES[case]
    return make_module(
        optimizer, SHAPES, pooling, feature_table_map=FEATURE_TABLES, **{**given, **keywords}
    )


def _reference_states(module: TableBatchedEmbeddingBags) -> list[list[torch.Tensor]]:
    return [[state.double() for state in table] for table in module.split_optimizer_states()]


def _compare(module, tables, states, tolerance: float) -> None:
    for found, expected in zip(module.split_embedding_weights(), tables, strict=True):
        assert relative_error(found, expected) <= tolerance
    for found_states, expected_states in zip(module.split_optimizer_states(), states, strict=True):
        for found, expected in zip(found_states, expected_states, strict=True):
            assert found.dtype == torch.float32
            assert relative_error(found, expected) <= tolerance


@OPTIMIZERS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_equals_float64_reference(case, pooling, weighted, index_dtype) -> None:
    optimizer, given = CASES[case]
    module = _module(case, pooling)
    start = random_tables(SHAPES)
    fill(module, start)
    tables, states = [table.double() for table in start], _reference_states(module)
    for step in range(1, 6):
        batch = random_batch(
            ROWS, 6, 5, pooling=pooling, weighted=weighted, index_dtype=index_dtype
        )
        output = run_forward(module, batch)
        expected = reference.lookup(tables, FEATURE_TABLES, batch)
        assert relative_error(output.detach(), expected) <= 2e-5
        gradient = torch.randn_like(output)
        output.backward(gradient)
        reference.train_step(
            reference.UPDATES[optimizer.name],
            tables,
            states,
            FEATURE_TABLES,
            batch,
            gradient,
            step,
            **of_update(given),
        )
        _compare(module, tables, states, TOLERANCES.get(optimizer, 2e-5))


@OPTIMIZERS
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), examples=st.integers(0, 9), longest=st.integers(0, 40))
def test_without_pooling(case, seed, examples, longest) -> None:
    optimizer, given = CASES[case]
    torch.manual_seed(seed)
    shapes, feature_tables = [(5, 8), (9, 8)], [0, 1, 1]
    module = make_module(optimizer, shapes, "none", feature_table_map=feature_tables, **given)
    start = random_tables(shapes)
    fill(module, start)
    tables, states = [table.double() for table in start], _reference_states(module)
    batch = random_batch([5, 9, 9], examples, longest, pooling="none")
    output = run_forward(module, batch)
    assert relative_error(output.detach(), reference.lookup(tables, feature_tables, batch)) == 0.0
    gradient = torch.randn_like(output)
    output.backward(gradient)
    reference.train_step(
        reference.UPDATES[optimizer.name],
        tables,
        states,
        feature_tables,
        batch,
        gradient,
        1,
        **of_update(given),
    )
    _compare(module, tables, states, TOLERANCES.get(optimizer, 2e-5))


def _trained(case: str, threads: int, capability: str, **keywords):
    optimizer, given = CASES[case]
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    _C.set_cpu_capability(capability)
    shapes = [(50, 4), (3, 36), (2000, 64), (31, 100), (9, 516), (70, 1), (12, 7), (9, 131)]
    module = make_module(optimizer, shapes, **given, **keywords)
    fill(module, random_tables(shapes))
    for _ in range(2):
        # Long rows (over 1,024 lookups), tails, and enough lookups for several threads.
        batch = random_batch([rows for rows, _ in shapes], 700, 40, weighted=True)
        output = run_forward(module, batch)
        output.backward(torch.randn_like(output))
    return snapshot(module)


@pytest.fixture
def restored():
    """Puts threads and capability back."""
    threads, capability = torch.get_num_threads(), _C.build_information()["cpu_capability"]
    yield capability
    torch.set_num_threads(threads)
    _C.set_cpu_capability(capability)


@OPTIMIZERS
@pytest.mark.parametrize("keywords", [{}, HALF, {**HALF, "stochastic_rounding": True}])
def test_same_bits_everywhere(case, keywords, restored) -> None:
    expected = _trained(case, 1, "default", **keywords)
    available = CAPABILITIES[: CAPABILITIES.index(restored) + 1]
    for capability in available:
        for threads in (1, 2, 3):
            found = _trained(case, threads, capability, **keywords)
            assert_same_bits(found, expected)


@OPTIMIZERS
def test_untouched_rows_keep_their_bits(case) -> None:
    module = _module(case)
    fill(module, random_tables(SHAPES))
    before = snapshot(module)
    offsets = torch.zeros(len(ROWS) * 1 + 1, dtype=torch.int64)
    offsets[1:] = 1  # feature 0 looks one row up, the others nothing
    module(torch.tensor([3]), offsets).sum().backward()
    after = snapshot(module)
    changed = [(a != b).reshape(a.shape[0], -1).any(1) for a, b in zip(before, after, strict=True)]
    assert changed[0].nonzero().flatten().tolist() == [3]
    assert not any(mask.any() for mask in changed[1 : len(SHAPES)])


@OPTIMIZERS
def test_half_weights_are_rounded_to_nearest(case) -> None:
    exact, half = _module(case), _module(case, **HALF)
    start = random_tables(SHAPES)
    fill(exact, start)
    fill(half, start)
    batch = random_batch(ROWS, 6, 5)
    gradient = torch.randn_like(run_forward(exact, batch))
    run_forward(exact, batch).backward(gradient)
    run_forward(half, batch).backward(gradient)
    pairs = zip(exact.split_embedding_weights(), half.split_embedding_weights(), strict=True)
    for full, rounded in pairs:
        assert rounded.dtype == torch.float16
        assert torch.equal(full.half(), rounded)
    assert_same_bits(snapshot(exact)[len(SHAPES) :], snapshot(half)[len(SHAPES) :])
