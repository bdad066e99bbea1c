"""The CUDA kernels under AddressSanitizer and UBSan, in a process that has them from its start."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from torchrec_ext import ops

from ..cuda_shim import build
from ..cuda_shim.library import FORWARD, RANDOM, REVERSE
from . import cases, kernels
from .cases import Case
from .test_lookup import expected_of, look_up

FACTORS = {
    "variant": (
        "sgd",
        "sgd momentum",
        "adagrad",
        "rowwise adagrad L2",
        "ftrl",
        "ftrl group lasso",
        "ftrl power",
        "adam per row",
        "partial rowwise adam decoupled",
        "lamb",
    ),
    # 8, 16 and 32 lanes, with and without tails.
    "dims": ((32,), (4, 20), (64, 8), (36,), (128, 100), (516, 4), (3, 1), (33, 7), (130, 5)),
    "weights": ((torch.float32, False), (torch.float16, True), (torch.bfloat16, True)),
    "gradient": (torch.float32, torch.float16),
    "gradient_layout": ("contiguous", "unaligned"),
    "order": (FORWARD, REVERSE, RANDOM),
    "batch": (
        {},
        {"weighted": True, "pooling": ops.POOLING_MEAN},
        {"variable": True, "index": torch.int32},
    ),
}


def run_any_two_features_together() -> int:
    """Like the test of this name, in fewer combinations, and the widest row with sums over it."""
    combinations = cases.covering(FACTORS)
    for factors in combinations:
        dims = factors["dims"]
        weights, stochastic = factors["weights"]
        case = Case(
            factors["variant"],
            [(rows, dims[i % len(dims)]) for i, rows in enumerate((11, 1, 0, 3))],
            (0, 1, 2, 0, 3),
            weights,
            stochastic,
            factors["gradient"],
            factors["gradient_layout"],
            **factors["batch"],
        )
        call = cases.make_call(case)
        with cases.running(factors["order"]):
            cases.assert_updates_agree(call)
            cases.assert_weight_gradients_agree(call)
            assert cases.same_bits(look_up(call), expected_of(call))
    for dim in (2048, 2047):
        cases.assert_updates_agree(cases.make_call(Case("lamb", ((5, dim),))))
    return len(combinations)


def run_long_rows() -> int:
    """Rows whose sums are stored; the last lookups of the batch are theirs."""
    all_segments = ((1, 32, 33, 64), (31, 64), (1023, 2048), (1025,), (70, 2100, 31), (5, 32769))
    for segments in all_segments:
        for variant, dim in (("sgd", 4), ("lamb", 36), ("sgd", 3), ("lamb", 35)):
            case = Case(variant, ((len(segments), dim),))
            cases.assert_updates_agree(cases.make_call(case, cases.lookups_of_segments(segments)))
    return len(all_segments)


def run_cached_rows() -> int:
    """The second table's rows are in managed memory and in the last slots of the cache."""
    dims = (20, 36, 132, 7)
    for dim in dims:
        call = cases.make_call(Case("adam L2", ((5, 8), (3, dim)), (0, 1)))
        split = [(t[:40].clone(), t[40:].clone()) for t in [call.weights, *call.states]]
        layout = ops.device_layout(call.table_layout, call.feature_table_map, torch.device("cpu"))
        cache = torch.cat([torch.zeros(2, dim), split[0][1].view(3, dim)])
        tables = ops.DeviceTables(
            layout.layout,
            managed_weights=split[0][1],
            managed_states=[managed for _, managed in split[1:]],
            cache_weights=cache,
            cache_locations=torch.where(call.rows < 5, -1, call.rows - 3).int(),
        )
        cases.update_in(call, tables, split[0][0], [first for first, _ in split[1:]])
        found = torch.cat([split[0][0], cache[2:].flatten()])
        assert cases.same_bits(found, cases.update_on_cpu(call)[0])
    return len(dims)


def main() -> None:
    kernels.load("sanitized")
    torch.manual_seed(0)
    for run in (run_any_two_features_together, run_long_rows, run_cached_rows):
        print(run.__name__, run(), flush=True)


def test_all_of_it() -> None:
    kernels.build("sanitized")
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        env=os.environ | build.sanitizer_environment(),
        cwd=kernels.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "run_any_two_features_together",
        "run_long_rows",
        "run_cached_rows",
    ]


if __name__ == "__main__":
    main()
