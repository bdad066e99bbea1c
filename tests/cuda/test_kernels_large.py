"""The CUDA kernels where 32 bits are not enough: numbers of rows, and elements of each buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrec_ext import ops

from . import cases, kernels
from .cases import Call, Case
from .test_lookup import expected_of, look_up

ROWS, DIM = 4_500_000, 1024  # 4.6e9 elements, of which only a few pages exist
Allocate = Callable[[torch.dtype], Tensor]


@pytest.fixture
def allocate(tmp_path: Path) -> Allocate:
    """Gives zeros of ROWS * DIM elements."""

    def make(dtype: torch.dtype) -> Tensor:
        path = tmp_path / f"sparse {len(list(tmp_path.iterdir()))}"
        return torch.from_file(str(path), shared=True, size=ROWS * DIM, dtype=dtype)

    return make


def small_call(variant: str, indices: list[int]) -> Call:
    """A call with float16 weights for a table of 8 rows."""
    lookups = [(torch.tensor(indices), torch.tensor([2] * (len(indices) // 2)))]
    return cases.make_call(Case(variant, ((8, DIM),), (0,), weights=torch.float16), lookups)


def moved_to_the_end(call: Call) -> Call:
    """The same call for the last 8 of ROWS rows."""
    layout = call.table_layout.clone()
    layout[0, 0] = ROWS
    return dataclasses.replace(call, table_layout=layout, indices=call.indices + (ROWS - 8))


def last_rows(call: Call, large: list[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in [call.weights, *call.states]]
    return [tensor[-size:] for tensor, size in zip(large, sizes, strict=True)]


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("variant", ["adam L2", "partial rowwise adam L2"])
def test_weights_and_states(allocate: Allocate, variant: str, managed: bool) -> None:
    call = small_call(variant, [7, 0, 3, 7, 3, 5])
    large = [allocate(tensor.dtype) for tensor in [call.weights, *call.states]]
    if variant != "adam L2":  # its second state has an element for a row
        large[2] = torch.zeros(ROWS)
    for end, start in zip(last_rows(call, large), [call.weights, *call.states], strict=True):
        end.copy_(start)
    at_end = moved_to_the_end(call)
    layout, features = at_end.table_layout, at_end.feature_table_map
    tables = ops.device_layout(layout, features, torch.device("cpu"))
    nothing = [tensor[:0].clone() for tensor in large]
    if managed:
        tables = dataclasses.replace(tables, managed_weights=large[0], managed_states=large[1:])
    given = nothing if managed else large
    cases.update_in(at_end, tables, given[0], given[1:])
    # Without stochastic rounding a row's number does not matter.
    cases.assert_same_memory(last_rows(call, large), cases.update_on_cpu(call))
    assert all(tensor[: 8 * DIM].count_nonzero() == 0 for tensor in large)


def test_the_cache(allocate: Allocate) -> None:
    call = small_call("sgd", [7, 0, 3, 7, 3, 5])
    cache = allocate(torch.float16).view(ROWS, DIM)
    cache[-8:] = call.weights.view(8, DIM)
    tables = dataclasses.replace(
        ops.device_layout(call.table_layout, call.feature_table_map, torch.device("cpu")),
        managed_weights=torch.zeros_like(call.weights),
        managed_states=[],
        cache_weights=cache,
        cache_locations=(call.indices + (ROWS - 8)).int(),
    )
    cases.update_in(call, tables, call.weights[:0].clone(), [])
    cases.assert_same_memory([cache[-8:].flatten()], cases.update_on_cpu(call))
    assert cache[:8].count_nonzero() == 0


def test_the_gradient(allocate: Allocate) -> None:
    call = small_call("sgd", [7, 0, 3, 7, 3, 5])
    gradient = allocate(torch.float16)
    call = dataclasses.replace(call, gradient=call.gradient.half())
    size = call.gradient.numel()
    gradient[-size:] = call.gradient.flatten()
    batch = ops.VariableBatch(torch.tensor([0, 3]), ROWS * DIM - size + torch.arange(3) * DIM)
    large = dataclasses.replace(call, gradient=gradient, variable_batch=batch)
    cases.assert_same_memory(cases.update_on_cuda(large), cases.update_on_cpu(call))
    expected = cases.weight_gradient(call, None, gradient=call.gradient.float())
    with kernels.in_place_of_the_cpu_kernels():
        assert cases.same_bits(cases.weight_gradient(large, None), expected)


def test_a_gradient_that_is_too_large_for_rows_of_any_width(allocate: Allocate) -> None:
    """Sources count elements there, in 32 bits."""
    call = cases.make_call(Case("sgd", ((8, 3),), variable=True))
    large = dataclasses.replace(call, gradient=allocate(torch.float16)[: 2**32 - 1])
    with pytest.raises(RuntimeError, match="at most 4294967294 fit where a dim is no multiple"):
        cases.update_on_cuda(large)
    cases.update_on_cuda(dataclasses.replace(call, gradient=large.gradient[: 2**32 - 2]))


def test_the_lookup(allocate: Allocate) -> None:
    call = small_call("sgd", [7, 0, 3, 7, 3, 5])
    large = dataclasses.replace(moved_to_the_end(call), weights=allocate(torch.float16))
    large.weights[-call.weights.numel() :] = call.weights
    assert cases.same_bits(look_up(large), look_up(call))
    assert cases.same_bits(look_up(call), expected_of(call))


TABLE_ROWS, TABLE_DIM = 2**20, 4


def numbered_call(variant: str, total_rows: int) -> Call:
    """Tables in three buffers; features read the first, two in the middle and the last."""
    tables = -(-total_rows // TABLE_ROWS)
    last = total_rows - (tables - 1) * TABLE_ROWS
    # Rows of their own for features whose tables share a buffer, and the last row of the last one.
    lookups = []
    for first, segments in ((0, [1, 40, 1]), (9, [2, 33]), (20, [1] * 7), (last - 3, [2, 1060, 1])):
        lengths = torch.tensor(segments)
        indices = first + torch.repeat_interleave(torch.arange(len(segments)), lengths)
        lookups.append((indices, torch.tensor([len(indices), 0])))
    features = (0, 2000, tables - 2, tables - 1)
    shapes = [(1, TABLE_DIM)] * tables
    case = Case(variant, shapes, features, weights=torch.float16, stochastic=True)
    call = cases.make_call(case, lookups)
    layout = call.table_layout.clone()
    layout[:, 0] = torch.tensor([TABLE_ROWS] * (tables - 1) + [last])
    buffer = torch.arange(tables) % 3 * TABLE_ROWS
    layout[:, 2] = buffer * TABLE_DIM
    layout[:, 3:] = buffer[:, None]
    return dataclasses.replace(
        call,
        table_layout=layout,
        weights=torch.randn(3 * TABLE_ROWS * TABLE_DIM).half(),
        states=[torch.rand(3 * TABLE_ROWS) for _ in call.states],  # a number for each row
    )


@pytest.mark.parametrize("variant", ["sgd", "rowwise adagrad"])
@pytest.mark.parametrize("total_rows", [2**32 - 1, 2**32, 2**32 + 9, 2**32 + 2**21 + 5])
def test_numbers_of_rows(variant: str, total_rows: int) -> None:
    call = numbered_call(variant, total_rows)
    cases.assert_updates_agree(call)
    cases.assert_weight_gradients_agree(call)
