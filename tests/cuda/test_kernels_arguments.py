"""Arguments that the CUDA kernels refuse: which message, and that nothing was changed."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_ext import OptimType, ops

from ..modules import kernel_values
from ..test_ops import BAD as BAD_ON_CPU
from ..test_ops import _arguments
from . import cases, kernels

pytestmark = pytest.mark.usefixtures("poisoned")

# What the host checks before a kernel runs has the CPU's messages; what tensors hold does not.
_KERNELS_CHECK = ("index 3", "index -1", "index 10", "run from", "must start", "end at 3")
_ALLOWED = ("must be contiguous",)
BAD_ALIKE = [bad for bad in BAD_ON_CPU if not bad[1].startswith((*_KERNELS_CHECK, *_ALLOWED))]


def assert_refused(arguments: dict[str, Any], message: str) -> None:
    before = [tensor.clone() for tensor in [arguments["weights"], *arguments["states"]]]
    with kernels.in_place_of_the_cpu_kernels(), pytest.raises(RuntimeError, match=message):
        ops.fused_update(**arguments)
    after = [arguments["weights"], *arguments["states"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("changes", "message"), BAD_ALIKE, ids=[text for _, text in BAD_ALIKE])
def test_as_on_the_cpu(changes: dict[str, Any], message: str) -> None:
    assert_refused(_arguments(**changes), message)


# What the kernel prints, before it traps.
BAD_BATCHES = [
    ({"indices": torch.tensor([3, 0, 4])}, "index 3 of feature 0, lookup 0, .* has 3 rows"),
    ({"indices": torch.tensor([2, 0, 5])}, "index 5 of feature 1, lookup 2, .* has 5 rows"),
    ({"indices": torch.tensor([2, 0, -1])}, "index -1 of feature 1, lookup 2"),
    ({"indices": torch.tensor([2, 0, 2**40])}, "index 1099511627776 of feature 1"),
    ({"indices": torch.tensor([2, 2**32, 1])}, "index 4294967296 of feature 0"),
    ({"offsets": torch.tensor([0, 2, 1, 2, 3])}, "offsets of bag 1 run from 2 to 1"),
    ({"offsets": torch.tensor([0, 9, 1, 2, 3])}, "offsets of bag 1 run from 9 to 1"),
    ({"offsets": torch.tensor([1, 1, 2, 2, 3])}, "offsets of bag 0 run from 1 to 1"),
    ({"offsets": torch.tensor([0, 1, 2, 2, 2])}, "offsets of bag 3 run from 2 to 2"),
    ({"offsets": torch.tensor([0, 1, 2, 2, 4])}, "offsets of bag 3 run from 2 to 4"),
    ({"offsets": torch.tensor([-1, 1, 2, 2, 3])}, "offsets of bag 0 run from -1 to 1"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("changes", "message"), BAD_BATCHES, ids=[text for _, text in BAD_BATCHES])
def test_the_kernel_traps(changes: dict[str, Tensor], message: str, dtype, capfd) -> None:
    arguments = _arguments(**changes)
    if int(arguments["indices"].max()) >= 2**31:
        dtype = torch.int64
    for name in ("indices", "offsets"):
        arguments[name] = arguments[name].to(dtype)
    assert_refused(
        arguments, "the kernel find_lookups: .* calls __trap, at (lookups.cu|batch_checks.h)"
    )
    assert re.search(message, printed(capfd))


def printed(capfd) -> str:
    """What kernels printed, from C's buffer too."""
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out


def test_the_gradient_of_per_sample_weights_traps_too(capfd) -> None:
    arguments = _arguments(indices=torch.tensor([2, 0, 5]))
    names = ("grad_output", "weights", "table_layout", "feature_table_map", "indices", "offsets")
    with (
        kernels.in_place_of_the_cpu_kernels(),
        pytest.raises(RuntimeError, match="the kernel find_lookups: .* calls __trap"),
    ):
        given = [arguments[name] for name in names]
        ops.per_sample_weight_grad(*given, None, pooling_mode=ops.POOLING_SUM)
    assert "index 5 of feature 1, lookup 2" in printed(capfd)


def test_a_launch_after_a_trap_has_nothing_left_of_it() -> None:
    assert_refused(_arguments(indices=torch.tensor([2, 0, 5])), "__trap")
    arguments = _arguments()
    with kernels.in_place_of_the_cpu_kernels():
        ops.fused_update(**arguments)
    assert arguments["weights"].count_nonzero() == 4 + 4 + 8


def variable_arguments(gradient_offsets: list[int], bags: tuple[int, ...] = (0, 1, 3)) -> dict:
    """Features of one and two examples."""
    return _arguments(
        grad_output=torch.ones(4 + 16),
        offsets=torch.tensor([0, 2, 2, 3]),
        variable_batch=ops.VariableBatch(torch.tensor(bags), torch.tensor(gradient_offsets)),
    )


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([-4, 4, 12], "the gradient of bag 0 begins at element -4 of 20"),
        ([2, 4, 12], "the gradient of bag 0 begins at element 2 of 20"),
        ([20, 4, 12], "the gradient of bag 0 begins at element 20 of 20"),
        ([0, 4, 16], "the gradient of bag 2 begins at element 16 of 20"),
    ],
)
def test_gradients_of_variable_batches(offsets: list[int], message: str, capfd) -> None:
    assert_refused(variable_arguments(offsets), "the kernel find_lookups: .* calls __trap")
    assert message in printed(capfd)


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        ((1, 2, 3), "feature_bags of feature 0 run from 1 to 2 in a batch of 3 bags"),
        ((0, 1, 2), "feature_bags of feature 1 run from 1 to 2"),
        ((0, 4, 3), "feature_bags of feature 1 run from 4 to 3"),
        ((3, 3, 3), "feature_bags of feature 0 run from 3 to 3"),
    ],
)
def test_bags_of_variable_batches(bags: tuple[int, ...], message: str, capfd) -> None:
    assert_refused(variable_arguments([0, 4, 12], bags), "the kernel find_lookups: .* calls __trap")
    assert message in printed(capfd)


def test_lookups_in_no_bag() -> None:
    arguments = _arguments(grad_output=torch.ones(0, 12), offsets=torch.tensor([0]))
    assert_refused(arguments, "offsets has 1 elements, which is no bag for 3 lookups")


def _unaligned(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size + 1, dtype=dtype)[1:]


TABLES = torch.tensor([[3, 4, 0, 0, 0], [5, 8, 12, 12, 12]])
BAD_FOR_KERNELS: list[tuple[dict[str, Any], str]] = [
    (
        {"table_layout": torch.tensor([[3, 4, 0, 0, 0], [5, 2052, 12, 12, 12]])},
        "table 1 has dim 2052; on CUDA dims are at most 2048",
    ),
    (
        {"table_layout": torch.tensor([[3, 3, 0, 0, 0], [5, 2049, 12, 12, 12]])},
        "table 1 has dim 2049; on CUDA dims are at most 2048",
    ),
    (
        {"table_layout": torch.tensor([[3, 4, 0, 0, 0], [5, 9, 12, 12, 12]])},
        "linear of table 1 ends at element 57 of a buffer of 52",
    ),
    (
        {"table_layout": torch.tensor([[3, 4, 0, 0, 0], [4, 8, 14, 12, 12]])},
        "weights of table 1 begin at element 14, not at a multiple of 4",
    ),
    (
        {"table_layout": torch.tensor([[3, 4, 0, 0, 0], [4, 8, 12, 12, 13]])},
        "accum of table 1 begins at element 13, not at a multiple of 4",
    ),
    ({"weights": _unaligned(52)}, "weights must begin at a multiple of 16 bytes"),
    ({"weights": _unaligned(52, torch.half)}, "weights must begin at a multiple of 16 bytes"),
    ({"weights": torch.zeros(104)[::2]}, "weights must be contiguous"),
    (
        {"states": [torch.zeros(52), _unaligned(52)]},
        "accum must begin at a multiple of 16 bytes",
    ),
    ({"states": [torch.zeros(104)[::2], torch.zeros(52)]}, "linear must be contiguous"),
    ({"segments": [torch.zeros(1)] * 3}, "segments are for weights on the CPU"),
    ({"grad_output": torch.ones(2, 12).long()}, "grad_output has the wrong dtype Long"),
    ({"grad_output": torch.ones(2, 13)}, r"expected \[2, 12\]"),
    ({"scalars": torch.zeros(5, dtype=torch.int64)}, "step_scalars has 5 elements for 10 scalars"),
    ({"scalars": torch.zeros(6)}, "step_scalars has the wrong dtype"),
    (
        {"optimizer": OptimType.EXACT_SGD, "hyperparameters": kernel_values(OptimType.EXACT_SGD)},
        "2 states, expected 0|layout has 5",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD_FOR_KERNELS, ids=[text for _, text in BAD_FOR_KERNELS]
)
def test_what_only_kernels_refuse(changes: dict[str, Any], message: str) -> None:
    assert_refused(_arguments(**changes), message)


def _tables(**changes: Any) -> ops.DeviceTables:
    layout = ops.device_layout(TABLES, torch.tensor([0, 1]), torch.device("cpu"))
    return dataclasses.replace(layout, **changes)


MANAGED = {"managed_weights": torch.zeros(40), "managed_states": [torch.zeros(40)] * 2}
CACHE = {
    **MANAGED,
    "cache_weights": torch.zeros(4, 8),
    "cache_locations": torch.zeros(3, dtype=torch.int32),
}
FIRST = {"weights": torch.zeros(12), "states": [torch.zeros(12), torch.zeros(12)]}
BAD_TABLES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"layout": torch.zeros(19, dtype=torch.int64)}, "device_layout has 19 elements"),
    ({}, {"layout": torch.zeros(20)}, "device_layout has the wrong dtype"),
    ({"weights": torch.zeros(12)}, {}, "weights of table 1 ends at element 52 of a buffer of 12"),
    (
        FIRST,
        {**MANAGED, "managed_weights": torch.zeros(39)},
        "weights of table 1 ends at element 52 of a buffer of 51",
    ),
    (
        {**FIRST, "weights": torch.zeros(16)},
        MANAGED,
        "weights of table 1 begins in the first buffer and ends in the second",
    ),
    (
        {**FIRST, "states": [torch.zeros(12), torch.zeros(48)]},
        MANAGED,
        "accum of table 1 begins in the first buffer and ends in the second",
    ),
    (FIRST, {**MANAGED, "managed_states": [torch.zeros(40)]}, "1 managed states, expected 2"),
    (
        FIRST,
        {**MANAGED, "managed_weights": torch.zeros(40).half()},
        "managed_weights has the wrong",
    ),
    (FIRST, {**MANAGED, "managed_weights": _unaligned(40)}, "managed_weights must begin"),
    (
        FIRST,
        {**MANAGED, "managed_states": [torch.zeros(40), _unaligned(40)]},
        "accum must begin",
    ),
    (
        FIRST,
        {**MANAGED, "managed_states": [torch.zeros(40), torch.zeros(40).half()]},
        "accum has the wrong dtype",
    ),
    (FIRST, {**CACHE, "cache_weights": None}, "cache_locations without cache_weights"),
    (FIRST, {**CACHE, "cache_locations": torch.zeros(3).long()}, "cache_locations has the wrong"),
    (
        FIRST,
        {**CACHE, "cache_locations": torch.zeros(2).int()},
        "cache_locations has 2 elements for 3 lookups",
    ),
    (FIRST, {**CACHE, "cache_weights": torch.zeros(32)}, "cache_weights has 1 dimensions"),
    (FIRST, {**CACHE, "cache_weights": torch.zeros(4, 8).half()}, "cache_weights has the wrong"),
    (FIRST, {**CACHE, "cache_weights": _unaligned(32).view(4, 8)}, "cache_weights must begin"),
    (FIRST, {**CACHE, "cache_weights": torch.zeros(4, 10)}, "cache_weights has 10 columns"),
]


@pytest.mark.parametrize(
    ("changes", "tables", "message"), BAD_TABLES, ids=[text for *_, text in BAD_TABLES]
)
def test_tables_in_managed_memory(changes, tables, message) -> None:
    assert_refused(_arguments(**changes, tables=_tables(**tables)), message)


def test_those_tables_are_good_otherwise() -> None:
    arguments = _arguments(**{name: _cloned(value) for name, value in FIRST.items()})
    managed = {name: _cloned(value) for name, value in MANAGED.items()}
    with kernels.in_place_of_the_cpu_kernels():
        ops.fused_update(**arguments, tables=_tables(**managed))
    assert arguments["weights"].count_nonzero() == 8
    assert managed["managed_weights"].count_nonzero() == 8


def _cloned(value: Any) -> Any:
    return [tensor.clone() for tensor in value] if isinstance(value, list) else value.clone()


def test_the_ops_need_what_the_wrappers_make() -> None:
    arguments = _arguments()
    kernels.loaded()
    tensors = [arguments[name] for name in list(arguments)[:8]]
    options = [[], ops.POOLING_SUM, list(OptimType).index(OptimType.FTRL)]
    options += [arguments["hyperparameters"], 1.0, False, 0, 0]
    shim = torch.ops.torchrec_ext_cuda_shim
    with pytest.raises(RuntimeError, match="device_layout is missing"):
        shim.fused_update(*tensors, *options)
    layout = _tables().layout
    with pytest.raises(RuntimeError, match="step_scalars is missing"):
        shim.fused_update(*tensors, *options, device_layout=layout)


def test_step_scalars_go_before_the_step_and_the_hyperparameters() -> None:
    """A captured graph follows what is written to them."""
    for variant in ("sgd momentum", "adam L2", "lamb", "ftrl power"):
        case = cases.Case(variant, ((9, 8),), weights=torch.float16, stochastic=True, step=7)
        call = cases.make_call(case)
        values = call.options["hyperparameters"]
        scalars = ops.step_scalars(values, 7, torch.device("cpu"))
        other = dict(call.options) | {"step": 0, "hyperparameters": [0.77, *values[1:]]}
        weights, states = call.weights.clone(), [state.clone() for state in call.states]
        with kernels.in_place_of_the_cpu_kernels():
            ops.fused_update(
                call.gradient,
                weights,
                states,
                call.table_layout,
                call.feature_table_map,
                call.indices,
                call.offsets,
                None,
                scalars=scalars,
                **other,
            )
        cases.assert_same_memory([weights, *states], cases.update_on_cpu(call))


def test_the_gradient_of_per_sample_weights_needs_pooling_and_flags_of_features() -> None:
    call = cases.make_call(cases.Case(pooling=ops.POOLING_NONE))
    with kernels.in_place_of_the_cpu_kernels():
        with pytest.raises(RuntimeError, match="per_sample_weights need pooling"):
            cases.weight_gradient(call, None)
        call = cases.make_call(cases.Case())
        with pytest.raises(RuntimeError, match="feature_requires_grad has 2 elements for 1"):
            cases.weight_gradient(call, torch.ones(2, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="feature_requires_grad has the wrong dtype"):
            cases.weight_gradient(call, torch.ones(1))
        with pytest.raises(RuntimeError, match="per_sample_weights need pooling"):
            call = cases.make_call(cases.Case(weighted=True))
            options = dict(call.options) | {"pooling_mode": ops.POOLING_NONE}
            gradient = torch.ones(len(call.indices), 8)
            cases.update_on_cuda(dataclasses.replace(call, options=options, gradient=gradient))


def test_hyperparameters_of_the_right_number_are_good() -> None:
    assert len(kernel_values(OptimType.FTRL)) == len(_arguments()["hyperparameters"])
