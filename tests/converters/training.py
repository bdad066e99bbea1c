"""The same training in another library and in ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from ..modules import make_module
from .libraries import Arrays, Library

ROWS, DIM = 12, 4
#: Rows and their gradients, one row each.
Step = tuple[np.ndarray, np.ndarray]


def initial_weights(rows: int = ROWS, dim: int = DIM) -> np.ndarray:
    """float32 ``[rows, dim]``."""
    return np.random.default_rng(3).normal(size=(rows, dim)).astype(np.float32)


def steps(count: int, rows: int = ROWS, dim: int = DIM) -> list[Step]:
    """Half of the rows each; gradients that float32 halves exactly."""
    generator = np.random.default_rng(7)
    result = []
    for _ in range(count):
        touched = generator.permutation(rows)[: rows // 2]
        gradients = generator.normal(size=(len(touched), dim)).astype(np.float32)
        result.append((touched, gradients))
    return result


def train_there(
    library: Library, state: Arrays, given: Mapping[str, Any], some: Sequence[Step]
) -> None:
    """Steps in the other library's formula, in place."""
    for rows, gradients in some:
        library.step(state, rows, gradients.astype(np.float64), given)


def train_here(module: TableBatchedEmbeddingBags, some: Sequence[Step]) -> None:
    """Steps of ours; the first row is looked up twice, with half of its gradient each time."""
    for rows, gradients in some:
        indices = torch.tensor([rows[0], *rows])
        parts = np.concatenate([gradients[:1] / 2, gradients[:1] / 2, gradients[1:]])
        output = module(indices, torch.arange(len(indices) + 1))
        output.backward(torch.from_numpy(parts))


def module_for(hyperparameters: Mapping[str, Any], rows: int = ROWS) -> TableBatchedEmbeddingBags:
    """One table "t" under FTRL."""
    return make_module(OptimType.FTRL, [(rows, DIM)], table_names=["t"], **hyperparameters)


def error(found: Any, expected: np.ndarray) -> float:
    """The largest ``|difference| / max(1, |expected|)``."""
    difference = np.abs(np.asarray(found, dtype=np.float64) - expected)
    return float((difference / np.maximum(1.0, np.abs(expected))).max())
