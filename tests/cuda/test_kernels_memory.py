"""The CUDA kernels with tables in managed memory and with cached rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchrec_ext import ops

from ..cuda_shim.library import FORWARD, RANDOM, REVERSE
from . import cases, kernels
from .cases import Call, Case

pytestmark = pytest.mark.usefixtures("poisoned")

SHAPES = ((11, 20), (3, 36), (7, 4), (0, 8), (9, 36))
ANY_WIDTH = ((11, 20), (3, 35), (7, 1), (0, 8), (9, 37))
FEATURES = (0, 1, 2, 0, 4, 3)
STALE = 77.0  # what lies in managed memory where the row itself is in the cache


@dataclasses.dataclass
class Placed:
    """A call's weights and states: on the device, in managed memory and in the cache."""

    weights: Tensor
    states: list[Tensor]
    tables: ops.DeviceTables
    slots: dict[int, int]  # of the rows in the cache, by their number across tables

    def tensors(self) -> list[Tensor]:
        """Weights and states as of one memory, uncached copies of cached rows as they are."""
        managed = [self.tables.managed_weights, *(self.tables.managed_states or [])]
        return [torch.cat(pair) for pair in zip([self.weights, *self.states], managed, strict=True)]


def row_of(call: Call, flat: Tensor, number: int) -> Tensor:
    """A row of flat weights, by its number across tables."""
    for rows, dim, offset, *_ in call.table_layout.tolist():
        if number < rows:
            return flat[offset + number * dim : offset + (number + 1) * dim]
        number -= rows
    raise IndexError


def place(call: Call, first_managed: int, cached: Sequence[int] = (), stride: int = 44) -> Placed:
    """Puts the tables from `first_managed` on into managed memory, and rows into a cache."""
    cuts = call.table_layout[first_managed, 2:].tolist()
    split = [
        (tensor[:cut].clone(), tensor[cut:].clone())
        for tensor, cut in zip([call.weights, *call.states], cuts, strict=True)
    ]
    slots = dict(zip(cached, torch.randperm(len(cached) + 3).tolist(), strict=False))
    cache = torch.randn(len(cached) + 3, stride).to(call.weights.dtype)
    managed = split[0][1]
    offset = cuts[0]
    for number, slot in slots.items():
        row = row_of(call, call.weights, number)
        cache[slot, : len(row)] = row
        begin = row.storage_offset() - offset
        managed[begin : begin + len(row)] = STALE
    locations = torch.tensor([slots.get(int(row), -1) for row in call.rows], dtype=torch.int32)
    layout = ops.device_layout(call.table_layout, call.feature_table_map, torch.device("cpu"))
    tables = dataclasses.replace(
        layout,
        managed_weights=managed,
        managed_states=[part for _, part in split[1:]],
        cache_weights=cache,
        cache_locations=locations,
    )
    return Placed(split[0][0], [part for part, _ in split[1:]], tables, slots)


def expected_of(call: Call, placed: Placed) -> tuple[list[Tensor], Tensor]:
    """What must be in all tensors and in the cache, from the CPU's update."""
    after = cases.update_on_cpu(call)
    assert placed.tables.cache_weights is not None
    cache = placed.tables.cache_weights.clone()
    for number, slot in placed.slots.items():
        row = row_of(call, after[0], number)
        cache[slot, : len(row)] = row
        row.fill_(STALE)
    return after, cache


@pytest.mark.parametrize("shapes", [SHAPES, ANY_WIDTH])
@pytest.mark.parametrize("first_managed", [1, 2, 4])
@pytest.mark.parametrize("variant", ["sgd", "ftrl", "rowwise adagrad", "adam per row", "lamb"])
def test_tables_in_managed_memory(variant: str, first_managed: int, shapes) -> None:
    call = cases.make_call(Case(variant, shapes, FEATURES))
    placed = place(call, first_managed)
    tables = dataclasses.replace(placed.tables, cache_weights=None, cache_locations=None)
    cases.update_in(call, tables, placed.weights, placed.states)
    cases.assert_same_memory(placed.tensors(), cases.update_on_cpu(call))


def test_all_tables_in_managed_memory() -> None:
    call = cases.make_call(Case("adam L2", SHAPES, FEATURES))
    placed = place(call, 0)
    assert placed.weights.numel() == 0
    cases.update_in(call, placed.tables, placed.weights, placed.states)
    cases.assert_same_memory(placed.tensors(), cases.update_on_cpu(call))


@pytest.mark.parametrize(
    ("shapes", "stride"), [(SHAPES, 36), (SHAPES, 44), (SHAPES, 64), (ANY_WIDTH, 37)]
)
@pytest.mark.parametrize("order", [FORWARD, REVERSE, RANDOM])
@pytest.mark.parametrize(
    ("variant", "weights", "stochastic"),
    [
        ("sgd", torch.float32, False),
        ("ftrl", torch.float16, True),
        ("partial rowwise adam L2", torch.bfloat16, True),
        ("lamb", torch.float16, False),
    ],
)
def test_cached_rows(variant, weights, stochastic, order, shapes, stride) -> None:
    """A cached row is updated in the cache, and nowhere else; the others in managed memory."""
    case = Case(variant, shapes, FEATURES, weights=weights, stochastic=stochastic, weighted=True)
    call = cases.make_call(case)
    looked_up = [row for row in call.rows.unique().tolist() if row >= 11]
    # Half of the rows looked up, and one that is not.
    missed = next(row for row in range(11, 30) if row not in looked_up)
    placed = place(call, 1, [*looked_up[::2], missed], stride)
    expected, cache = expected_of(call, placed)
    with cases.running(order):
        cases.update_in(call, placed.tables, placed.weights, placed.states)
    cases.assert_same_memory(placed.tensors(), expected)
    assert placed.tables.cache_weights is not None
    assert cases.same_bits(placed.tables.cache_weights, cache)


@pytest.mark.parametrize("shapes", [SHAPES, ANY_WIDTH])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16])
def test_gradients_of_per_sample_weights_of_cached_rows(weights: torch.dtype, shapes) -> None:
    call = cases.make_call(Case("sgd", shapes, FEATURES, weights=weights))
    expected = cases.weight_gradient(call, None)
    placed = place(call, 1, [row for row in call.rows.unique().tolist() if row >= 11][1::2])
    with kernels.in_place_of_the_cpu_kernels():
        found = cases.weight_gradient(call, None, weights=placed.weights, tables=placed.tables)
    assert cases.same_bits(found, expected)
