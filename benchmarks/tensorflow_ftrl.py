"""``python -m benchmarks.tensorflow_ftrl``: our FTRL beside TensorFlow's, values and speed.

TensorFlow runs in an environment of its own (``benchmarks/requirements-tensorflow.txt``), in a
process that takes turns with this one. What it gets is what :mod:`torchrec_ext.converters` gives.

Values: tables are trained for some steps in both; the largest ``|difference| / max(1, |weight|)``
must not exceed 1e-6. Speed: TensorFlow's time is that of ``tf.unique``, ``unsorted_segment_sum``
and ``ResourceSparseApplyFtrlV2`` in a ``tf.function``, on one gradient per lookup that is ready
before the clock starts; ours is that of the whole backward, from one gradient per bag.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor

from benchmarks.shapes import Indices, Shape
from torchrec_ext import OptimType, converters
from torchrec_ext.converters.tables import load_table, read_table
from torchrec_ext.tbe import TableBatchedEmbeddingBags

TOLERANCE = 1e-6
ROWS, DIM, LOOKUPS, STEPS = 50, 8, 60, 10
GRID: dict[str, tuple[Any, ...]] = {
    "ftrl_beta": (0.0, 1.0),
    "l1_reg": (0.0, 0.1),
    "l2_reg": (0.0, 0.5),
    "l2_shrinkage_reg": (0.0, 0.1),
    "learning_rate_power": (-0.5, -0.7, 0.0),
    "multiply_linear_by_lr": (False, True),
}
FIXED = {"learning_rate": 0.1, "initial_accumulator_value": 0.1}
TIMED = {**FIXED, "ftrl_beta": 1.0, "l1_reg": 1e-3, "l2_reg": 1e-3}
WARM_UP = 3


class TensorFlow:
    """The other process."""

    def __init__(self, python: str, threads: int) -> None:
        """Starts it."""
        worker = str(Path(__file__).with_name("tensorflow_worker.py"))
        self._process = subprocess.Popen(
            [python, worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )
        self.version: str = self.call("start", threads=threads)["version"]

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One message and its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"TensorFlow's process ended in {name}; see its output above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_tables(shape: Shape, hyperparameters: dict[str, Any]) -> TableBatchedEmbeddingBags:
    """Tables under FTRL."""
    spec = (shape.rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    return TableBatchedEmbeddingBags(
        [spec] * shape.tables, optimizer=OptimType.FTRL, **hyperparameters
    )


def small_arrays() -> dict[str, Any]:
    """A table, its steps with repeated rows, and steps with a gradient for every row."""
    generator = np.random.default_rng(11)

    def normal(*size: int) -> Any:
        return generator.normal(size=size).astype(np.float32)

    return {
        "weights": normal(ROWS, DIM),
        "accum": np.full((ROWS, DIM), FIXED["initial_accumulator_value"], np.float32),
        "linear": np.zeros((ROWS, DIM), np.float32),
        "indices": generator.integers(ROWS, size=(STEPS, LOOKUPS)),
        "gradients": normal(STEPS, LOOKUPS, DIM),
        "dense_gradients": normal(STEPS, ROWS, DIM),
    }


def train_ours(arrays: dict[str, Any], given: dict[str, Any], dense: bool) -> Any:
    """The weights after all steps."""
    module = make_tables(Shape(1, ROWS, DIM, LOOKUPS, 1), given)
    states = {name: arrays[name] for name in ("linear", "accum")}
    load_table(module, 0, arrays["weights"], states, module.hyperparameters)
    every_row = np.broadcast_to(np.arange(ROWS), (STEPS, ROWS))
    batches = (every_row, arrays["dense_gradients"])
    if not dense:
        batches = (arrays["indices"], arrays["gradients"])
    for indices, gradients in zip(*batches, strict=True):
        output = module(torch.tensor(indices), torch.arange(len(indices) + 1))
        output.backward(torch.tensor(gradients))
    return read_table(module, 0)[0].double().numpy()


def compare_values(tensorflow: TensorFlow, folder: Path) -> bool:
    """Prints the largest difference over the grid; whether all are small enough."""
    arrays = small_arrays()
    np.savez(folder / "input.npz", **arrays)
    states = {name: arrays[name] for name in ("linear", "accum")}
    cases = [
        {**FIXED, **dict(zip(GRID, v, strict=True))} for v in itertools.product(*GRID.values())
    ]
    plain = [case for case in cases if not case["multiply_linear_by_lr"]]
    good = True
    for call, convert, some in (
        ("sparse_steps", converters.to_tensorflow_op, cases),
        ("keras_steps", converters.to_tensorflow, plain),
    ):
        arguments = [convert(states, case)[1] for case in some]
        paths = {name: str(folder / f"{name}.npz") for name in ("input", "output")}
        tensorflow.call(call, arguments=arguments, **paths)
        found = np.load(folder / "output.npz")
        errors = []
        for number, case in enumerate(some):
            ours, theirs = (
                train_ours(arrays, case, call == "keras_steps"),
                found[f"weights{number}"],
            )
            # Not fmax: a NaN of either must stay one.
            errors.append(float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(ours))).max()))
        worst = int(np.argmax(errors))
        good = good and all(error <= TOLERANCE for error in errors)
        print(f"{call}: {len(some)} cases, largest difference {errors[worst]:.2e}, {some[worst]}")
    return good


def compare_speed(tensorflow: TensorFlow, folder: Path, shape: Shape, repetitions: int) -> bool:
    """Prints times and ratios; whether both have the same weights in the end.

    The least times are those that other work on the machine disturbed least.
    """
    module = make_tables(shape, TIMED)
    states = {name: np.zeros((1, 1), np.float32) for name in ("linear", "accum")}
    _, arguments = converters.to_tensorflow_op(states, TIMED)
    sizes = {name: getattr(shape, name) for name in ("tables", "rows", "dim", "pooling")}
    accum = FIXED["initial_accumulator_value"]
    tensorflow.call("tables", arguments=arguments, initial_accumulator_value=accum, **sizes)
    indices, path = Indices(shape, "zipf"), folder / "batch.npz"
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(WARM_UP + repetitions):
        batch = indices.draw()
        gradient = torch.randn(shape.batch_size, shape.tables * shape.dim)
        write_batch(path, shape, batch, gradient)
        for side in (0, 1) if repetition % 2 else (1, 0):
            if side == 0:
                spent = time_ours(module, batch, shape.offsets(), gradient)
            else:
                spent = tensorflow.call("time", input=str(path))["milliseconds"]
            if repetition >= WARM_UP:
                times[side].append(spent)
    print_times(shape, times)
    sums = tensorflow.call("checksum")["sums"]
    own_sums = [float(w.double().abs().sum()) for w in module.split_embedding_weights()]
    return bool(np.allclose(own_sums, sums, rtol=1e-5))


def write_batch(path: Path, shape: Shape, indices: Tensor, gradient: Tensor) -> None:
    """Indices ``[tables, lookups]`` and gradients of bags ``[tables, batch size, D]``."""
    by_table = gradient.view(-1, shape.tables, shape.dim).transpose(0, 1).contiguous()
    np.savez(path, indices=indices.view(shape.tables, -1).numpy(), gradients=by_table.numpy())


def time_ours(
    module: TableBatchedEmbeddingBags, indices: Tensor, offsets: Tensor, gradient: Tensor
) -> float:
    """The milliseconds of one backward."""
    output = module(indices, offsets)
    begin = time.perf_counter()
    output.backward(gradient)
    return (time.perf_counter() - begin) * 1e3


def print_times(shape: Shape, times: tuple[list[float], list[float]]) -> None:
    """The table; times are ours and TensorFlow's, batch by batch."""
    print(f"{shape}, zipf, {len(times[0])} fresh batches; milliseconds, and TensorFlow / ours")
    for name, figure in (("median", statistics.median), ("least", min)):
        own, theirs = (figure(each) for each in times)
        print(f"  {name:8}ours {own:8.1f}   TensorFlow {theirs:8.1f}   ratio {theirs / own:6.2f}")
    ratios = [theirs / own for own, theirs in zip(*times, strict=True)]
    print(f"  median of the batches' ratios {statistics.median(ratios):.2f}")


def main() -> int:
    """Runs both comparisons; 1 if values differ."""
    parser = argparse.ArgumentParser(prog="benchmarks.tensorflow_ftrl", description=__doc__)
    parser.add_argument("--tensorflow", required=True, metavar="PYTHON", help="its environment's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each of the 4 tables")
    parser.add_argument("--only", choices=["values", "speed"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tensorflow = TensorFlow(arguments.tensorflow, arguments.threads)
    load = os.getloadavg()[0]
    print(f"TensorFlow {tensorflow.version}, {arguments.threads} threads each, load {load:.1f}")
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.only != "speed":
            good = compare_values(tensorflow, folder)
        if arguments.only != "values":
            shape = Shape(4, arguments.rows, 64, 2048, 20)
            good = compare_speed(tensorflow, folder, shape, arguments.repetitions) and good
    tensorflow.close()
    if not good:
        print("the values differ", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
