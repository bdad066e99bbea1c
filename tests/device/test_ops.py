"""The ops on a device give the CPU's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrec_ext import OptimType, ops

from ..hyperparameters import CASES
from .cases import Case

pytestmark = pytest.mark.cuda
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(OptimType), ids=lambda o: o.name)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VARIANTS: list[tuple[OptimType, dict[str, Any]]] = [
    (OptimType.EXACT_SGD, {"momentum": 0.9, "nesterov": True}),
    (OptimType.EXACT_ROWWISE_ADAGRAD, {"weight_decay": 0.1, "weight_decay_mode": "L2"}),
    (OptimType.FTRL, {"learning_rate_power": -0.3}),
    CASES["FTRL-extended"],
    CASES["FTRL-group-lasso"],
    CASES["FTRL-everything"],
    (OptimType.ADAM, {"bias_correction": "per_row"}),
    (OptimType.ADAM, {"weight_decay_mode": "L2"}),
]


def _check(case: Case) -> None:
    for on_device, on_cpu in zip(case.run("cuda"), case.run("cpu"), strict=True):
        assert torch.equal(on_device, on_cpu)


@OPTIMIZERS
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
def test_dtypes(optimizer, weight_dtype, gradient_dtype) -> None:
    _check(Case(optimizer, weight_dtype=weight_dtype, gradient_dtype=gradient_dtype))


@pytest.mark.parametrize("optimizer, hyperparameters", VARIANTS)
def test_variants(optimizer, hyperparameters) -> None:
    _check(Case(optimizer, hyperparameters))


@OPTIMIZERS
@pytest.mark.parametrize("weight_dtype", DTYPES[1:], ids=str)
def test_stochastic_rounding(optimizer, weight_dtype) -> None:
    options = {"stochastic_rounding": True, "seed": 7}
    _check(Case(optimizer, weight_dtype=weight_dtype, options=options))


@OPTIMIZERS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_mean_pooling_and_clipping(optimizer, weighted, index_dtype) -> None:
    _check(
        Case(
            optimizer,
            pooling_mode=ops.POOLING_MEAN,
            weighted=weighted,
            index_dtype=index_dtype,
            options={"max_gradient": 0.5},
        )
    )


@OPTIMIZERS
def test_without_pooling(optimizer) -> None:
    _check(Case(optimizer, shapes=[(40, 20), (9, 20)], pooling_mode=ops.POOLING_NONE))


@OPTIMIZERS
@pytest.mark.parametrize(
    "dim", [4, 28, 32, 36, 64, 132, 516, 2048, 1, 2, 3, 5, 6, 7, 9, 33, 65, 131, 2047]
)
def test_dims(optimizer, dim) -> None:
    _check(Case(optimizer, shapes=[(30, dim), (5, 4)], hot=200))


@OPTIMIZERS
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_rows_of_any_width(optimizer, weight_dtype) -> None:
    shapes = [(50, 3), (3, 36), (2000, 65), (31, 1)]
    case = Case(optimizer, shapes=shapes, weight_dtype=weight_dtype, hot=1100, weighted=True)
    _check(case)
    assert torch.equal(case.run_weight_gradient("cuda"), case.run_weight_gradient("cpu"))


@pytest.mark.parametrize("pooling_mode", [ops.POOLING_SUM, ops.POOLING_MEAN, ops.POOLING_NONE])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_lookup(pooling_mode, weight_dtype, output_dtype, index_dtype) -> None:
    pooled = pooling_mode != ops.POOLING_NONE
    case = Case(
        OptimType.EXACT_SGD,
        shapes=[(50, 3), (3, 36), (2000, 65), (31, 1)] if pooled else [(50, 35), (9, 35)],
        weight_dtype=weight_dtype,
        gradient_dtype=output_dtype,
        index_dtype=index_dtype,
        pooling_mode=pooling_mode,
        weighted=pooled,
        hot=70,
    )
    assert torch.equal(case.run_lookup("cuda"), case.looked_up())


@OPTIMIZERS
@pytest.mark.parametrize("hot", [33, 1025, 40_000, 700_000])
def test_rows_with_many_lookups(optimizer, hot) -> None:
    _check(Case(optimizer, shapes=[(5, 16), (3, 16)], hot=hot))


@OPTIMIZERS
def test_a_small_batch_for_sanitized_runs(optimizer) -> None:
    shapes = [(20, 4), (9, 36), (5, 132)]
    _check(Case(optimizer, shapes=shapes, examples=10, longest=5, hot=1100, weighted=True))


@OPTIMIZERS
def test_a_large_batch(optimizer) -> None:
    _check(Case(optimizer, shapes=[(100_000, 32)] * 4, examples=8192, longest=20))


@pytest.mark.parametrize("pooling_mode", [ops.POOLING_SUM, ops.POOLING_MEAN])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_gradient_of_per_sample_weights(pooling_mode, weight_dtype) -> None:
    case = Case(OptimType.EXACT_SGD, pooling_mode=pooling_mode, weight_dtype=weight_dtype)
    assert torch.equal(case.run_weight_gradient("cuda"), case.run_weight_gradient("cpu"))


@pytest.mark.parametrize("arrange", ["transposed", "expanded", "unaligned"])
def test_gradients_that_must_be_copied(arrange) -> None:
    case = Case(OptimType.FTRL, shapes=[(50, 8), (20, 8)])
    if arrange == "transposed":
        case.gradient = case.gradient.t().contiguous().t()
    elif arrange == "expanded":
        case.gradient = torch.randn(1, 16).expand(case.examples, 16)
    else:
        flat = torch.randn(case.examples * 16 + 1)
        case.gradient = flat[1:].view(case.examples, 16)
    expected = case.run("cpu")
    on_device = case.gradient.to("cuda")
    if arrange == "unaligned":
        on_device = torch.empty(case.examples * 16 + 1, device="cuda")[1:].view(-1, 16)
        on_device.copy_(case.gradient)
    tensors = (on_device, *case.tensors("cuda")[1:])
    ops.fused_update(*tensors, **case.keywords())
    for found, each in zip([tensors[1], *tensors[2]], expected, strict=True):
        assert torch.equal(found.cpu(), each)


def test_another_stream() -> None:
    case = Case(OptimType.ADAM, examples=2000)
    expected = case.run("cpu")
    tensors = case.tensors("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.fused_update(*tensors, **case.keywords())
        found = [tensors[1].cpu(), *(state.cpu() for state in tensors[2])]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_the_current_one() -> None:
    case = Case(OptimType.FTRL)
    for found, expected in zip(case.run("cuda:1"), case.run("cpu"), strict=True):
        assert torch.equal(found, expected)


def test_the_host_never_waits() -> None:
    case = Case(OptimType.ADAM, weighted=True)
    tensors, keywords = case.tensors("cuda"), case.keywords()
    keywords["tables"] = ops.device_layout(case.layout, case.features, torch.device("cuda"))
    keywords["scalars"] = ops.step_scalars(case.kernel_hyperparameters, 3, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.fused_update(*tensors, **keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")
