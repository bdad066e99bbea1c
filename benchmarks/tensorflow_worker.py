"""TensorFlow's side of ``benchmarks.tensorflow_ftrl``: a script for TensorFlow's own environment.

Reads one JSON object per line, ``{"call": name, ...}``, and answers each with another. Arrays
travel in ``.npz`` files.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

Variables = tuple[tf.Variable, tf.Variable, tf.Variable]


def make_variables(weights: Any, accum: Any, linear: Any) -> Variables:
    """The variables of one table."""
    return tf.Variable(weights), tf.Variable(accum), tf.Variable(linear)


def update(variables: Variables, indices: Any, gradients: Any, arguments: dict[str, Any]) -> None:
    """One step as TensorFlow's optimizers make it: repeated indices are summed, then applied.

    Args:
        variables: Of the table.
        indices: ``[lookups]``.
        gradients: float32 ``[lookups, D]``.
        arguments: The other arguments of ``ResourceSparseApplyFtrlV2``.
    """
    rows, positions = tf.unique(indices)
    summed = tf.math.unsorted_segment_sum(gradients, positions, tf.shape(rows)[0])
    weights, accum, linear = (variable.handle for variable in variables)
    tf.raw_ops.ResourceSparseApplyFtrlV2(
        var=weights, accum=accum, linear=linear, grad=summed, indices=rows, **arguments
    )


def sparse_steps(message: dict[str, Any]) -> dict[str, Any]:
    """Trains one small table anew for every set of arguments; writes weights and states."""
    arrays = np.load(message["input"])
    found = {}
    for number, arguments in enumerate(message["arguments"]):
        variables = make_variables(arrays["weights"], arrays["accum"], arrays["linear"])
        for indices, gradients in zip(arrays["indices"], arrays["gradients"], strict=True):
            update(variables, tf.constant(indices), tf.constant(gradients), arguments)
        for name, variable in zip(("weights", "accum", "linear"), variables, strict=True):
            found[f"{name}{number}"] = variable.numpy()
    np.savez(message["output"], **found)
    return {}


def keras_steps(message: dict[str, Any]) -> dict[str, Any]:
    """Trains one small table with Keras' Ftrl and dense gradients for every set of arguments."""
    arrays = np.load(message["input"])
    found = {}
    for number, arguments in enumerate(message["arguments"]):
        weights = tf.keras.Variable(arrays["weights"])
        optimizer = tf.keras.optimizers.Ftrl(**arguments)
        optimizer.build([weights])
        for gradients in arrays["dense_gradients"]:
            optimizer.apply([tf.constant(gradients)], [weights])
        states = {v.name.rpartition("_")[2]: v.numpy() for v in optimizer.variables}
        found[f"weights{number}"] = weights.numpy()
        found[f"accum{number}"], found[f"linear{number}"] = states["accumulator"], states["linear"]
    np.savez(message["output"], **found)
    return {}


class Tables:
    """Large tables whose updates are timed."""

    def __init__(self, message: dict[str, Any]) -> None:
        """Zero weights, and accumulators at the initial value."""
        size = (message["rows"], message["dim"])
        self._bag_length = message["pooling"]
        zeros = np.zeros(size, np.float32)
        accum = np.full(size, message["initial_accumulator_value"], np.float32)
        self._tables = [make_variables(zeros, accum, zeros) for _ in range(message["tables"])]
        arguments = message["arguments"]

        @tf.function
        def step(indices: list[Any], gradients: list[Any]) -> None:
            for parts in zip(self._tables, indices, gradients, strict=True):
                update(*parts, arguments)

        self._step: Callable[..., None] = step

    def time(self, message: dict[str, Any]) -> dict[str, Any]:
        """The milliseconds of one update; what a forward's backward would hand over is prepared."""
        arrays = np.load(message["input"])
        indices = [tf.constant(part) for part in arrays["indices"]]
        gradients = [
            tf.constant(np.repeat(part, self._bag_length, axis=0)) for part in arrays["gradients"]
        ]
        begin = time.perf_counter()
        self._step(indices, gradients)
        return {"milliseconds": (time.perf_counter() - begin) * 1e3}

    def checksum(self) -> dict[str, Any]:
        """What the weights' absolute values add up to, table by table."""
        return {"sums": [float(np.abs(w.numpy()).sum(dtype=np.float64)) for w, *_ in self._tables]}


def main() -> None:
    """Answers until the input ends."""
    tables: Tables | None = None
    for line in sys.stdin:
        message = json.loads(line)
        call = message["call"]
        if call == "start":
            threads = message["threads"]
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
            answer: dict[str, Any] = {"version": tf.__version__}
        elif call == "sparse_steps":
            answer = sparse_steps(message)
        elif call == "keras_steps":
            answer = keras_steps(message)
        elif call == "tables":
            tables, answer = Tables(message), {}
        elif tables is not None:
            answer = tables.time(message) if call == "time" else tables.checksum()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
