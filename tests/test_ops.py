"""The ops: order of sums, index arithmetic, checks, and what PyTorch asks of a custom op."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_ext import OptimType, ops

from .modules import kernel_values

FAN_OUT = 32


def _arguments(**changes: Any) -> dict[str, Any]:
    """A good call of fused_update: two tables, two features, two examples."""
    arguments: dict[str, Any] = {
        "grad_output": torch.ones(2, 12),
        "weights": torch.zeros(3 * 4 + 5 * 8),
        "states": [torch.zeros(52), torch.zeros(52)],
        "table_layout": torch.tensor([[3, 4, 0, 0, 0], [5, 8, 12, 12, 12]]),
        "feature_table_map": torch.tensor([0, 1]),
        "indices": torch.tensor([2, 0, 4]),
        "offsets": torch.tensor([0, 1, 2, 2, 3]),
        "per_sample_weights": None,
        "pooling_mode": ops.POOLING_SUM,
        "optimizer": OptimType.FTRL,
        "hyperparameters": kernel_values(OptimType.FTRL, lr=0.1, ftrl_beta=1.0),
    }
    return {**arguments, **changes}


def _sum_in_order(rows: np.ndarray) -> np.ndarray:
    """The canonical order: sums of 32 lookups, of 32 such sums, of 32 of those, then the rest."""
    for size in (FAN_OUT, FAN_OUT, FAN_OUT, len(rows)):
        groups = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        rows = np.stack([functools.reduce(np.add, group) for group in groups])
    assert rows.shape[0] == 1 and rows.dtype == np.float32
    return rows[0]


@pytest.mark.parametrize(
    "lookups", [1, 2, 31, 32, 33, 64, 65, 1000, 1024, 1025, 5000, 32768, 32769, 68001]
)
@pytest.mark.parametrize("dim", [4, 20, 100])
def test_sums_in_the_canonical_order(lookups, dim) -> None:
    gradient = torch.randn(lookups + 7, dim)
    indices = torch.full((lookups + 7,), 1)
    indices[::lookups] = 0  # some other row's lookups in between
    weights = torch.zeros(2 * dim)
    ops.fused_update(
        gradient,
        weights,
        [],
        torch.tensor([[2, dim, 0]]),
        torch.tensor([0]),
        indices,
        torch.arange(lookups + 8),
        None,
        pooling_mode=ops.POOLING_SUM,
        optimizer=OptimType.EXACT_SGD,
        hyperparameters=kernel_values(OptimType.EXACT_SGD, lr=1.0),
    )
    for row in (0, 1):
        rows = gradient[indices == row].numpy()
        if len(rows):
            assert np.array_equal(-weights.view(2, dim)[row].numpy(), _sum_in_order(rows))


@pytest.mark.parametrize("dim", [1, 3, 4, 31, 32, 33, 64, 100, 516, 2048])
def test_row_sums_in_their_order(dim) -> None:
    """128 partial sums by column modulo 128, folded by 64, 32, .. 1."""
    gradient = torch.randn(1, dim)
    state = torch.zeros(1)
    ops.fused_update(
        gradient,
        torch.zeros(dim),
        [state],
        torch.tensor([[1, dim, 0, 0]]),
        torch.tensor([0]),
        torch.tensor([0]),
        torch.tensor([0, 1]),
        None,
        pooling_mode=ops.POOLING_SUM,
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        hyperparameters=kernel_values(OptimType.EXACT_ROWWISE_ADAGRAD, lr=0.1, eps=0.0),
    )
    partials = np.zeros(128, np.float32)
    for column, g in enumerate(gradient[0].numpy()):
        partials[column % 128] += g * g
    fold = 64
    while fold:
        partials[:fold] += partials[fold : 2 * fold]
        fold //= 2
    assert state.numpy()[0] == partials[0] / np.float32(dim)


def test_tables_beyond_32_bits(tmp_path) -> None:
    """Weights of more than 2^31 elements, rows numbered beyond 2^32; only a few pages exist."""
    rows, dim = 3_000_000, 1024
    weights = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=rows * dim, dtype=torch.float16
    )
    # The same buffer 1,500 times over: 4.5e9 rows, each table's last row at element 3.07e9.
    layout = torch.tensor([[rows, dim, 0]] * 1500)
    last = torch.tensor([rows - 1])
    arguments: dict[str, Any] = {
        "pooling_mode": ops.POOLING_SUM,
        "optimizer": OptimType.EXACT_SGD,
        "hyperparameters": kernel_values(OptimType.EXACT_SGD, lr=1.0),
    }
    for tables in (layout[:1], layout):
        feature = torch.tensor([len(tables) - 1])
        gradient = torch.ones(1, dim)
        offsets = torch.tensor([0, 1])
        ops.fused_update(gradient, weights, [], tables, feature, last, offsets, None, **arguments)
    assert torch.equal(weights[-dim:], torch.full((dim,), -2.0, dtype=torch.float16))
    assert weights[:dim].count_nonzero() == 0


BAD = [
    ({"indices": torch.tensor([3, 0, 4])}, "index 3 of feature 0, example 0"),
    ({"indices": torch.tensor([2, 0, -1])}, "index -1 of feature 1, example 1"),
    ({"indices": torch.tensor([2, 0, 2**40])}, "index 1099511627776"),
    ({"indices": torch.tensor([2.0, 0.0, 4.0])}, "indices have dtype"),
    ({"offsets": torch.tensor([0, 2, 1, 2, 3])}, "run from 2 to 1"),
    ({"offsets": torch.tensor([0, 9, 1, 2, 3])}, "run from 0 to 9"),
    ({"offsets": torch.tensor([1, 1, 2, 2, 3])}, "must start at 0"),
    ({"offsets": torch.tensor([0, 1, 2, 2, 2])}, "end at 3"),
    ({"offsets": torch.tensor([0, 1, 2, 3])}, "features \\* batch_size"),
    ({"offsets": torch.tensor([0, 1, 2, 2, 3], dtype=torch.int32)}, "offsets has the wrong dtype"),
    ({"grad_output": torch.ones(2, 8)}, r"expected \[2, 12\]"),
    ({"grad_output": torch.ones(2, 12).double()}, "grad_output has the wrong dtype"),
    ({"grad_output": torch.ones(12, 2).t()}, "must be contiguous"),
    ({"weights": torch.zeros(51)}, "weights of table 1 ends at element 52"),
    ({"weights": torch.zeros(52).double()}, "expected Float, Half or BFloat16"),
    ({"states": [torch.zeros(52)]}, "1 states, expected 2"),
    ({"states": [torch.zeros(52), torch.zeros(51)]}, "accum of table 1"),
    ({"states": [torch.zeros(52), torch.zeros(52).half()]}, "accum has the wrong dtype"),
    ({"table_layout": torch.tensor([[3, 4, 0, 0], [5, 8, 12, 12]])}, "table_layout has 4 columns"),
    ({"table_layout": torch.tensor([[3, 4, 0, 0, 0], [5, 0, 12, 12, 12]])}, "5 rows of dim 0"),
    ({"feature_table_map": torch.tensor([0, 2])}, "feature 1 reads table 2 of 2"),
    ({"per_sample_weights": torch.ones(2)}, "2 elements for 3 lookups"),
    ({"per_sample_weights": torch.ones(3).double()}, "per_sample_weights has the wrong dtype"),
    ({"pooling_mode": 3}, "pooling_mode is 3"),
    ({"pooling_mode": ops.POOLING_NONE}, "same dim|expected"),
    ({"hyperparameters": [0.1]}, "1 hyperparameters, expected 9"),
    ({"max_gradient": -1.0}, "max_gradient is -1"),
    ({"max_gradient": math.nan}, "max_gradient is nan"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[message for _, message in BAD])
def test_bad_arguments_change_nothing(changes, message) -> None:
    arguments = _arguments(**changes)
    before = [tensor.clone() for tensor in [arguments["weights"], *arguments["states"]]]
    with pytest.raises(RuntimeError, match=message):
        ops.fused_update(**arguments)
    after = [arguments["weights"], *arguments["states"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_good_arguments_are_good() -> None:
    arguments = _arguments()
    ops.fused_update(**arguments)
    assert arguments["weights"].count_nonzero() == 4 + 4 + 8


def test_weight_gradient_checks() -> None:
    arguments = _arguments()
    names = ("grad_output", "weights", "table_layout", "feature_table_map", "indices", "offsets")
    good = [arguments[name] for name in names]
    with pytest.raises(RuntimeError, match="need pooling"):
        ops.per_sample_weight_grad(
            torch.ones(3, 4),
            *good[1:2],
            torch.tensor([[3, 4, 0]]),
            torch.tensor([0]),
            torch.tensor([0, 1, 2]),
            torch.tensor([0, 1, 2, 3]),
            None,
            pooling_mode=ops.POOLING_NONE,
        )
    with pytest.raises(RuntimeError, match="3 elements for 2 features"):
        required = torch.ones(3, dtype=torch.int32)
        ops.per_sample_weight_grad(*good, required, pooling_mode=ops.POOLING_SUM)
    with pytest.raises(RuntimeError, match="index 7 of feature 1"):
        good[4] = torch.tensor([2, 0, 7])
        ops.per_sample_weight_grad(*good, None, pooling_mode=ops.POOLING_SUM)


def test_opcheck() -> None:
    arguments = _arguments()
    hyperparameters = arguments.pop("hyperparameters")
    pooling_mode, _ = arguments.pop("pooling_mode"), arguments.pop("optimizer")
    optimizer = list(OptimType).index(OptimType.FTRL)
    tensors = tuple(arguments.values())
    rest = ([], pooling_mode, optimizer, hyperparameters, math.inf, False, 0, 0)
    torch.library.opcheck(torch.ops.torchrec_ext.fused_update.default, tensors + rest)
    grad_output, weights, _, layout, features, indices, offsets, _ = tensors
    torch.library.opcheck(
        torch.ops.torchrec_ext.per_sample_weight_grad.default,
        (grad_output, weights, layout, features, indices, offsets, None, pooling_mode, math.inf),
    )
    torch.library.opcheck(
        torch.ops.torchrec_ext.sort_lookups.default, (layout, features, indices, offsets)
    )


def _catch_up_arguments(**changes: Any) -> dict[str, Any]:
    """Two tables of 3 x 4 and 5 x 8 under Adam, two rows of which slept through update 1."""
    arguments: dict[str, Any] = {
        "weights": torch.ones(52),
        "states": [torch.ones(52), torch.ones(52)],
        "row_steps": torch.tensor([1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.int32),
        "table_layout": torch.tensor([[3, 4, 0, 0, 0], [5, 8, 12, 12, 12]]),
        "rows": None,
        "history": torch.tensor([[0.0, -1.0], [0.1, 0.0], [0.0, 0.0]], dtype=torch.float64),
        "history_start": 0,
        "window": 300,
        "now": 1,
        "optimizer": OptimType.ADAM,
        "hyperparameters": kernel_values(OptimType.ADAM, lr=0.1, eps=0.0),
    }
    return {**arguments, **changes}


def test_catch_up() -> None:
    arguments = _catch_up_arguments()
    ops.catch_up(**arguments)
    # Half of 1, less a step of .1.
    expected = torch.ones(52)
    expected[4:8] = 0.4
    expected[12 + 3 * 8 : 12 + 4 * 8] = 0.4
    torch.testing.assert_close(arguments["weights"], expected)
    assert arguments["row_steps"].tolist() == [1] * 8


BAD_CATCH_UP = [
    ({"rows": torch.tensor([1, 8])}, "row 8"),
    ({"rows": torch.tensor([6, 1])}, "ascending"),
    ({"rows": torch.tensor([1], dtype=torch.int32)}, "rows has the wrong dtype"),
    ({"row_steps": torch.zeros(7, dtype=torch.int32)}, "row_steps"),
    ({"history_start": 1, "now": 2}, "the history starts at 1"),
    ({"history": torch.zeros(3, 1, dtype=torch.float64)}, "history"),
    ({"optimizer": OptimType.LAMB, "hyperparameters": [0.1, 0.9, 0.99, 0.0, 0.0]}, "catch up"),
]


@pytest.mark.parametrize("changes, message", BAD_CATCH_UP, ids=[text for _, text in BAD_CATCH_UP])
def test_a_bad_catch_up_changes_nothing(changes, message) -> None:
    arguments = _catch_up_arguments(**changes)
    with pytest.raises(RuntimeError, match=message):
        ops.catch_up(**arguments)
    assert torch.equal(arguments["weights"], torch.ones(52))
    assert all(torch.equal(state, torch.ones(52)) for state in arguments["states"])


def test_opcheck_of_catch_up() -> None:
    arguments = _catch_up_arguments()
    arguments["optimizer"] = list(OptimType).index(arguments["optimizer"])
    torch.library.opcheck(torch.ops.torchrec_ext.catch_up.default, (*arguments.values(), False, 0))
