"""The CUDA lookup, run on the CPU: the bits of a sum in float32, lookup by lookup."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_ext import ops

from ..cuda_shim.library import FORWARD, RANDOM, REVERSE
from . import cases, kernels
from .cases import Call, Case
from .test_kernels import BATCHES, case_of
from .test_kernels_any_width import DIMS
from .test_kernels_arguments import printed

pytestmark = pytest.mark.usefixtures("poisoned")

HALF, BFLOAT16 = torch.float16, torch.bfloat16
FACTORS = {
    "variant": ("sgd",),
    "dims": (*DIMS, (8,), (132, 4)),
    "weights": ((torch.float32, False), (HALF, False), (BFLOAT16, False)),
    "gradient": (torch.float32, HALF, BFLOAT16),  # the output's dtype, too
    "gradient_layout": ("contiguous",),
    "index": (torch.int32, torch.int64),
    "batch": tuple(BATCHES),
    "max_gradient": (1.0,),
    "step": (0,),
    "order": (FORWARD, REVERSE, RANDOM),
    "multiprocessors": (1, 4, 132),
}


def look_up(call: Call, **changes: Any) -> Tensor:
    """The CUDA kernel's output, of the gradient's shape and dtype."""
    output = torch.empty_like(call.gradient)
    arguments: dict[str, Any] = {
        "output": output,
        "weights": call.weights,
        "table_layout": call.table_layout,
        "feature_table_map": call.feature_table_map,
        "indices": call.indices,
        "offsets": call.offsets,
        "per_sample_weights": call.per_sample_weights,
        "pooling_mode": call.options["pooling_mode"],
        "variable_batch": call.variable_batch,
        **changes,
    }
    with kernels.in_place_of_the_cpu_kernels():
        ops.lookup(**arguments)
    return arguments["output"]


def pool(rows: Tensor, weights: Tensor, pooling: int) -> Tensor:
    """One bag: float32 ``[lookups, D]`` and ``[lookups]``, added up one by one."""
    total = torch.zeros(rows.shape[1])
    for row, weight in zip(rows, weights, strict=True):
        total = total + weight * row
    return total / len(rows) if pooling == ops.POOLING_MEAN and len(rows) else total


def expected_of(call: Call) -> Tensor:
    """What the lookup must give."""
    pooling, batch = call.options["pooling_mode"], call.variable_batch
    output = torch.full(call.gradient.shape, torch.nan)
    features = call.feature_table_map.tolist()
    bags = call.offsets.numel() - 1
    size = bags // len(features)
    feature_bags = [f * size for f in range(len(features) + 1)]
    if batch is not None:
        feature_bags = batch.feature_bags.tolist()
    columns = [0, *itertools.accumulate(int(call.table_layout[t, 1]) for t in features)]
    for feature, table in enumerate(features):
        rows, dim, offset, *_ = call.table_layout[table].tolist()
        weights = call.weights[offset : offset + rows * dim].view(rows, dim).float()
        for bag in range(feature_bags[feature], feature_bags[feature + 1]):
            begin, end = call.offsets[bag : bag + 2].tolist()
            looked_up = weights[call.indices[begin:end].long()]
            if pooling == ops.POOLING_NONE:
                output[begin:end] = looked_up
                continue
            scales = torch.ones(end - begin)
            if call.per_sample_weights is not None:
                scales = call.per_sample_weights[begin:end]
            pooled = pool(looked_up, scales, pooling)
            if batch is not None:
                start = int(batch.gradient_offsets[bag])
                output[start : start + dim] = pooled
            else:
                output[bag - feature_bags[feature], columns[feature] : columns[feature + 1]] = (
                    pooled
                )
    return output.to(call.gradient.dtype)


@pytest.mark.parametrize(
    "factors", cases.covering(FACTORS), ids=lambda f: f"{f['dims']}-{f['batch']}-{f['gradient']}"
)
def test_any_two_features_together(factors: dict[str, Any]) -> None:
    """Tables of 1, 3, 11 and no rows; two of them are read by two features."""
    call = cases.make_call(case_of(factors))
    with cases.running(factors["order"], factors["multiprocessors"]):
        assert cases.same_bits(look_up(call), expected_of(call))


@pytest.mark.parametrize("dim", [3, 34, 130])
@pytest.mark.parametrize("pooling", [ops.POOLING_SUM, ops.POOLING_MEAN, ops.POOLING_NONE])
def test_bags_around_the_number_of_lanes(dim: int, pooling: int) -> None:
    lengths = torch.tensor([0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 1000, 0])
    case = Case(shapes=((40, dim),), pooling=pooling, weighted=pooling != ops.POOLING_NONE)
    call = cases.make_call(case, [(torch.randint(0, 40, (int(lengths.sum()),)), lengths)])
    for order in (FORWARD, REVERSE, RANDOM):
        with cases.running(order):
            assert cases.same_bits(look_up(call), expected_of(call))


def test_more_bags_than_a_grid_has_groups_of_lanes() -> None:
    case = Case(shapes=((40, 5), (7, 3)), features=(0, 1))
    call = cases.make_call(case, cases.random_lookups(case, 700, 2))
    with cases.running(multiprocessors=1):
        assert cases.same_bits(look_up(call), expected_of(call))


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("examples", [0, 5])
def test_batches_without_lookups_give_zeros(examples: int, variable: bool) -> None:
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(examples, dtype=torch.int64)
    for pooling in (ops.POOLING_SUM, ops.POOLING_MEAN):
        case = Case(shapes=((4, 3), (0, 6)), features=(0, 1), pooling=pooling, variable=variable)
        output = look_up(cases.make_call(case, [nothing] * 2))
        assert cases.same_bits(output, torch.zeros(output.shape))


def test_sums_start_from_plus_zero() -> None:
    """A bag of rows of -0 gives +0, as an empty one does; without pooling -0 stays."""
    call = cases.make_call(Case(shapes=((4, 3),)), [(torch.arange(4), torch.tensor([1, 2, 0, 1]))])
    call.weights.fill_(-0.0)
    assert cases.same_bits(look_up(call), torch.zeros(4, 3))
    call = cases.make_call(Case(shapes=((4, 3),), pooling=ops.POOLING_NONE))
    call.weights.fill_(-0.0)
    assert cases.same_bits(look_up(call), torch.full(call.gradient.shape, -0.0))


def test_infinity_nan_and_overflow_of_the_output() -> None:
    indices, lengths = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([1, 1, 1, 2])
    call = cases.make_call(Case(shapes=((4, 3),), gradient=HALF), [(indices, lengths)])
    call.weights.view(4, 3)[:] = torch.tensor([[torch.inf], [torch.nan], [7e4], [3e4]])
    output = look_up(call)
    assert output[1].isnan().all()
    assert output[[0, 2]].isposinf().all()
    assert torch.equal(output[3], torch.full((3,), 6e4, dtype=HALF))


CALL = Case(shapes=((3, 3), (5, 8)), features=(0, 1))
LOOKUPS = [
    (torch.tensor([2, 0]), torch.tensor([2, 0])),
    (torch.tensor([4]), torch.tensor([0, 1])),
]
BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"indices": torch.tensor([3, 0, 4])}, "index 3 of feature 0, lookup 0, .* has 3 rows"),
    ({"indices": torch.tensor([2, 0, 5])}, "index 5 of feature 1, lookup 2, .* has 5 rows"),
    ({"indices": torch.tensor([2, -1, 4])}, "index -1 of feature 0, lookup 1"),
    ({"offsets": torch.tensor([0, 2, 1, 2, 3])}, "offsets of bag 1 run from 2 to 1"),
    ({"offsets": torch.tensor([0, 9, 1, 2, 3])}, "offsets of bag 0 run from 0 to 9"),
    ({"offsets": torch.tensor([0, -1, 2, 2, 3])}, "offsets of bag 0 run from 0 to -1"),
    ({"offsets": torch.tensor([1, 2, 2, 2, 3])}, "offsets of bag 0 run from 1 to 2"),
    ({"offsets": torch.tensor([0, 2, 2, 2, 2])}, "offsets of bag 3 run from 2 to 2"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("changes", "message"), BAD_BATCHES, ids=[text for _, text in BAD_BATCHES])
def test_the_kernel_traps(changes: dict[str, Tensor], message: str, dtype, capfd) -> None:
    call = cases.make_call(dataclasses.replace(CALL, index=dtype), LOOKUPS)
    changes = {name: tensor.to(dtype) for name, tensor in changes.items()}
    with pytest.raises(RuntimeError, match="the kernel look_up_rows: .* calls __trap"):
        look_up(call, **changes)
    assert re.search(message, printed(capfd))


@pytest.mark.parametrize(
    ("bags", "places", "message"),
    [
        ((0, 2, 4), (-1, 3, 6, 14), "the output of bag 0 begins at element -1 of 22"),
        ((0, 2, 4), (0, 3, 6, 15), "the output of bag 3 begins at element 15 of 22"),
        ((1, 2, 4), (0, 3, 6, 14), "feature_bags of feature 0 run from 1 to 2"),
        ((0, 5, 4), (0, 3, 6, 14), "feature_bags of feature 1 run from 5 to 4"),
    ],
)
def test_variable_batches_that_do_not_fit(bags, places, message, capfd) -> None:
    call = cases.make_call(dataclasses.replace(CALL, variable=True), LOOKUPS)
    batch = ops.VariableBatch(torch.tensor(bags), torch.tensor(places))
    with pytest.raises(RuntimeError, match="calls __trap"):
        look_up(call, variable_batch=batch)
    assert message in printed(capfd)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"output": torch.zeros(2, 12)}, r"output has .* expected \[2, 11\]"),
    ({"output": torch.zeros(2, 11).long()}, "output has the wrong dtype Long"),
    ({"output": torch.zeros(11, 2).t()}, "output must be contiguous"),
    ({"weights": torch.zeros(48)}, "weights of table 1 ends at element 49 of a buffer of 48"),
    ({"weights": torch.zeros(49).long()}, "weights have dtype Long"),
    ({"per_sample_weights": torch.ones(2)}, "per_sample_weights has 2 elements for 3 lookups"),
    ({"pooling_mode": 3}, "pooling_mode is 3"),
    ({"pooling_mode": ops.POOLING_NONE}, r"expected \[3, 8\]"),
    (
        {"pooling_mode": ops.POOLING_NONE, "output": torch.zeros(3, 8)},
        "without pooling all tables must have the same dim",
    ),
    ({"table_layout": torch.tensor([[3, 2049, 0], [5, 8, 9]])}, "table 0 has dim 2049; .* 2048"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD_ARGUMENTS, ids=[text for _, text in BAD_ARGUMENTS]
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        look_up(cases.make_call(CALL, LOOKUPS), **changes)


def test_on_the_cpu_it_says_what_to_use() -> None:
    call = cases.make_call(CALL, LOOKUPS)
    output = torch.zeros_like(call.gradient)
    tensors = [call.weights, call.table_layout, call.feature_table_map, call.indices, call.offsets]
    with pytest.raises(RuntimeError, match="lookup got weights on cpu; it runs on CUDA"):
        ops.lookup(output, *tensors, None, pooling_mode=ops.POOLING_SUM)
