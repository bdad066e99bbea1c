"""Random calls of the ops for the tests of the CUDA kernels, run on both sides and compared."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchrec_ext import OptimType, ops
from torchrec_ext.optimizers import spec_of
from torchrec_ext.variable_batch import make_variable_batch

from ..cuda_shim import library
from ..modules import CASES, HYPERPARAMETERS, kernel_values
from . import kernels

MULTIPROCESSORS = 4  # what the shim has at first
# A feature's lookups: its indices, and the lengths of its bags.
Lookups = tuple[Tensor, Tensor]
VARIANTS: dict[str, tuple[OptimType, dict[str, Any]]] = {
    "sgd": (OptimType.EXACT_SGD, {}),
    "sgd momentum": (OptimType.EXACT_SGD, {"momentum": 0.9, "dampening": 0.3}),
    "sgd nesterov": (OptimType.EXACT_SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.5}),
    "adagrad": (OptimType.EXACT_ADAGRAD, {}),
    "rowwise adagrad": (OptimType.EXACT_ROWWISE_ADAGRAD, {}),
    "rowwise adagrad L2": (
        OptimType.EXACT_ROWWISE_ADAGRAD,
        {"weight_decay": 0.5, "weight_decay_mode": "L2"},
    ),
    "rowwise adagrad decoupled": (
        OptimType.EXACT_ROWWISE_ADAGRAD,
        {"weight_decay": 0.5, "weight_decay_mode": "DECOUPLE"},
    ),
    "ftrl": (OptimType.FTRL, {}),
    "ftrl power": (OptimType.FTRL, {"learning_rate_power": -0.7}),
    "ftrl preserving": (OptimType.FTRL, {"preserve_initial_weight": True}),
    "ftrl multiplied": (
        OptimType.FTRL,
        {"multiply_linear_by_lr": True, "l2_shrinkage_reg": 0.05, "learning_rate_power": -0.7},
    ),
    # Zeroes about half of the rows of the random calls, wide ones too.
    "ftrl group lasso": (OptimType.FTRL, {"l21_reg": 4.0}),
    "ftrl extended": (OptimType.FTRL, CASES["FTRL-everything"][1]),
    "adam L2": (OptimType.ADAM, {"weight_decay_mode": "L2"}),
    "adam decoupled": (OptimType.ADAM, {"weight_decay_mode": "DECOUPLE"}),
    "adam per row": (OptimType.ADAM, {"bias_correction": "per_row"}),
    "partial rowwise adam L2": (OptimType.PARTIAL_ROWWISE_ADAM, {"weight_decay_mode": "L2"}),
    "partial rowwise adam decoupled": (
        OptimType.PARTIAL_ROWWISE_ADAM,
        {"weight_decay_mode": "DECOUPLE"},
    ),
    "lamb": (OptimType.LAMB, {}),
}
# How an output gradient lies in memory.
GRADIENT_LAYOUTS = ("contiguous", "strided", "expanded", "unaligned")


@dataclass(frozen=True)
class Case:
    """What a call is made from; tables are (rows, dim), features the tables that they read."""

    variant: str = "sgd"
    shapes: Sequence[tuple[int, int]] = ((40, 8),)
    features: Sequence[int] = (0,)
    weights: torch.dtype = torch.float32
    stochastic: bool = False
    gradient: torch.dtype = torch.float32
    gradient_layout: str = "contiguous"
    index: torch.dtype = torch.int64
    pooling: int = ops.POOLING_SUM
    weighted: bool = False
    variable: bool = False
    max_gradient: float = math.inf
    step: int = 5
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """The arguments of the ops. `rows` has the number of each lookup's row, across tables."""

    gradient: Tensor
    weights: Tensor
    states: Sequence[Tensor]
    table_layout: Tensor
    feature_table_map: Tensor
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    variable_batch: ops.VariableBatch | None
    options: Mapping[str, Any]
    rows: Tensor


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Like torch.equal, but a zero's sign counts, and NaN equals NaN."""
    if found.dtype != expected.dtype:
        return False
    integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return torch.equal(found.view(integer), expected.view(integer))


def random_lookups(case: Case, examples: int = 7, longest: int = 5) -> list[Lookups]:
    """Bags of up to `longest` lookups, a third of them of the table's first row."""
    lookups = []
    for number, table in enumerate(case.features):
        rows = case.shapes[table][0]
        bags = examples + (3 * number if case.variable else 0)
        lengths = torch.randint(0, longest + 1 if rows > 0 else 1, (bags,))
        indices = torch.randint(0, max(rows, 1), (int(lengths.sum()),))
        indices[torch.rand(indices.shape) < 1 / 3] = 0
        lookups.append((indices, lengths))
    return lookups


def lookups_of_segments(segments: Sequence[int]) -> list[Lookups]:
    """Looks row i up segments[i] times, in random order, in bags of 0 to 4 lookups."""
    indices = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    indices = indices[torch.randperm(len(indices))]
    lengths = torch.randint(0, 5, (len(indices),))
    lengths = lengths[lengths.cumsum(0) <= len(indices)]
    rest = len(indices) - int(lengths.sum())
    return [(indices, torch.cat([lengths, torch.tensor([rest])]))]


def make_call(case: Case, lookups: Sequence[Lookups] | None = None) -> Call:
    """Random weights, states and gradients, some of which are -0."""
    lookups = random_lookups(case) if lookups is None else lookups
    optimizer, given = VARIANTS[case.variant]
    values = {**HYPERPARAMETERS[optimizer], **given, **case.hyperparameters}
    layout, sizes = _layout(case, optimizer, values)
    weights = _with_zeros(torch.randn(sizes[0])).to(case.weights)
    states = [_with_zeros(torch.rand(size)) for size in sizes[1:]]
    indices = torch.cat([indices for indices, _ in lookups])
    lengths = torch.cat([lengths for _, lengths in lookups])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    first_rows = torch.tensor([rows for rows, _ in case.shapes]).cumsum(0)
    first_rows = (first_rows - torch.tensor([rows for rows, _ in case.shapes])).tolist()
    numbers = [i + first_rows[t] for (i, _), t in zip(lookups, case.features, strict=True)]
    return Call(
        _gradient(case, lookups),
        weights,
        states,
        layout,
        torch.tensor(case.features),
        indices.to(case.index),
        offsets.to(case.index),
        torch.randn(len(indices)) if case.weighted else None,
        _variable_batch(case, lookups),
        {
            "pooling_mode": case.pooling,
            "optimizer": optimizer,
            "hyperparameters": kernel_values(optimizer, **values),
            "max_gradient": case.max_gradient,
            "stochastic_rounding": case.stochastic,
            "seed": 3,
            "step": case.step,
        },
        torch.cat(numbers),
    )


def _layout(case: Case, optimizer: OptimType, values: Mapping[str, Any]) -> tuple[Tensor, list]:
    """The layout, and the elements of the weights and of each state."""
    spec = spec_of(optimizer)
    rowwise = [False, *(state.rowwise for state in spec.states_for(spec.resolve(values)))]
    layout, sizes = [], [0] * len(rowwise)
    for rows, dim in case.shapes:
        layout.append([rows, dim, *sizes])
        sizes = [n + rows * (1 if r else dim) for n, r in zip(sizes, rowwise, strict=True)]
    return torch.tensor(layout), sizes


def _with_zeros(values: Tensor) -> Tensor:
    values[torch.rand(values.shape) < 0.1] = -0.0
    return values


def _gradient(case: Case, lookups: Sequence[Lookups]) -> Tensor:
    dims = [case.shapes[table][1] for table in case.features]
    if case.variable:
        sizes = [len(lengths) for _, lengths in lookups]
        shape: tuple[int, ...] = (sum(n * dim for n, dim in zip(sizes, dims, strict=True)),)
    elif case.pooling == ops.POOLING_NONE:
        shape = (sum(len(indices) for indices, _ in lookups), max(dims))
    else:
        shape = (len(lookups[0][1]), sum(dims))
    gradient = _with_zeros(torch.randn(shape)).to(case.gradient)
    if case.gradient_layout == "strided":
        return torch.stack([gradient, gradient + 1], dim=-1)[..., 0]
    if case.gradient_layout == "expanded":
        return gradient[:1].expand(shape)
    if case.gradient_layout == "unaligned":
        return torch.cat([gradient.new_ones(1), gradient.flatten()])[1:].view(shape)
    return gradient


def _variable_batch(case: Case, lookups: Sequence[Lookups]) -> ops.VariableBatch | None:
    """As of two ranks, the first of which has a third of the examples."""
    if not case.variable:
        return None
    sizes = [len(lengths) for _, lengths in lookups]
    dims = [case.shapes[table][1] for table in case.features]
    return make_variable_batch([[n // 3, n - n // 3] for n in sizes], dims, torch.device("cpu"))


def update_on_cpu(call: Call) -> list[Tensor]:
    """The weights and states after the CPU's update."""
    weights, states = call.weights.clone(), [state.clone() for state in call.states]
    ops.fused_update(*_update_arguments(call, weights, states, on_cpu=True), **_keywords(call))
    return [weights, *states]


def update_on_cuda(call: Call) -> list[Tensor]:
    """The weights and states after the CUDA kernels' update."""
    weights, states = call.weights.clone(), [state.clone() for state in call.states]
    with kernels.in_place_of_the_cpu_kernels():
        ops.fused_update(*_update_arguments(call, weights, states), **_keywords(call))
    return [weights, *states]


def update_in(
    call: Call,
    tables: ops.DeviceTables,
    weights: Tensor,
    states: Sequence[Tensor],
    scalars: Tensor | None = None,
) -> None:
    """The CUDA kernels' update of these weights and states, and of those in `tables`."""
    with kernels.in_place_of_the_cpu_kernels():
        arguments = _update_arguments(call, weights, states)
        ops.fused_update(*arguments, **_keywords(call), tables=tables, scalars=scalars)


def _update_arguments(
    call: Call, weights: Tensor, states: Sequence[Tensor], on_cpu: bool = False
) -> tuple:
    gradient = call.gradient.float().contiguous() if on_cpu else call.gradient
    batch = (call.indices, call.offsets, call.per_sample_weights)
    return (gradient, weights, states, call.table_layout, call.feature_table_map, *batch)


def _keywords(call: Call) -> dict[str, Any]:
    return {**call.options, "variable_batch": call.variable_batch}


def weight_gradient(call: Call, required: Tensor | None, **keywords: Any) -> Tensor:
    """The gradient of per-sample weights, by whichever kernels are in place."""
    weights = keywords.pop("weights", call.weights)
    return ops.per_sample_weight_grad(
        keywords.pop("gradient", call.gradient),
        weights,
        call.table_layout,
        call.feature_table_map,
        call.indices,
        call.offsets,
        required,
        pooling_mode=call.options["pooling_mode"],
        max_gradient=call.options["max_gradient"],
        variable_batch=call.variable_batch,
        **keywords,
    )


def assert_same_memory(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compares weights and states, bit by bit."""
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(left, right), f"state {number - 1}" if number else "weights"


def assert_updates_agree(call: Call) -> None:
    """Compares both sides' weights and states, which must have changed."""
    found = update_on_cuda(call)
    assert_same_memory(found, update_on_cpu(call))
    assert not same_bits(found[0], call.weights)


def assert_weight_gradients_agree(call: Call, required: Tensor | None = None) -> None:
    """Compares the gradients of per-sample weights, bit by bit."""
    expected = weight_gradient(call, required, gradient=call.gradient.float().contiguous())
    with kernels.in_place_of_the_cpu_kernels():
        assert same_bits(weight_gradient(call, required), expected)


@contextmanager
def running(order: int = library.FORWARD, multiprocessors: int = MULTIPROCESSORS) -> Iterator[None]:
    """Runs kernels in this order, on so many multiprocessors."""
    shim = kernels.loaded()
    shim.shim_set_multiprocessors(multiprocessors)
    try:
        with library.order(shim, order, 1):
            yield
    finally:
        shim.shim_set_multiprocessors(MULTIPROCESSORS)


def covering(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations of the factors' values in which any two values of two factors meet."""
    names = sorted(factors, key=lambda name: -len(factors[name]))
    generator = random.Random(0)
    places = {name: list(range(len(factors[name]))) for name in names}
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, j in itertools.product(places[a], places[b])
    }
    combinations = []
    while missing:
        chosen: dict[str, int] = dict(min(missing))
        for name in names:
            if name in chosen:
                continue
            generator.shuffle(places[name])
            chosen[name] = max(
                places[name],
                key=lambda i, name=name: len(missing & _pairs({**chosen, name: i}, names, name)),
            )
        missing -= _pairs(chosen, names)
        combinations.append({name: factors[name][chosen[name]] for name in factors})
    return combinations


def _pairs(chosen: Mapping[str, int], names: Sequence[str], only: str | None = None) -> set:
    items = [(name, chosen[name]) for name in names if name in chosen]
    return {pair for pair in itertools.combinations(items, 2) if only in (None, *dict(pair))}
