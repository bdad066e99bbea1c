"""The picture of ``torchrec-ext sparsity``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.sparsity import nonzero_rows
from torchrec_ext.train.history import History
from torchrec_ext.train.report import draw_zeros

_BINS = 40
# Of log10 of the norms; there are no bins between norms that differ by rounding alone.
_LEAST_RANGE = 1e-6
_COLUMNS = 4


@dataclass(frozen=True)
class RowNorms:
    """How the Euclidean norms of a table's rows are distributed.

    Attributes:
        counts: ``[bins]`` rows that are not zero, by norm.
        edges: ``[bins + 1]`` log10 of the norms between bins.
        zero_share: Share of zero rows, 0 to 1.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    zero_share: float


def norms_of_rows(weight: torch.Tensor) -> RowNorms:
    """Count the rows of a table ``[rows, dim]`` by their norms, as far as these are finite."""
    kept = nonzero_rows(weight)
    # float64: squares of small weights are no zeros there.
    norms = torch.linalg.vector_norm(weight[kept], dim=1, dtype=torch.float64)
    finite = norms[norms.isfinite()].log10().numpy()
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    if high - low < _LEAST_RANGE:
        low, high = low - 0.5, low + 0.5
    counts, edges = np.histogram(finite, bins=_BINS, range=(low, high))
    return RowNorms(counts, edges, 1 - int(kept.sum()) / max(len(weight), 1))


def draw_sparsity(path: Path, title: str, history: History, norms: Mapping[str, RowNorms]) -> None:
    """Draw zeros over the steps, as far as they were counted, and every table's row norms.

    Args:
        path: PNG to write.
        title: Of the picture.
        history: Of the run.
        norms: By table, in the order of the picture.

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-len(norms) // _COLUMNS)
    figure = Figure(figsize=(12, 3.2 + 2.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(lines + 1, _COLUMNS)
    draw_zeros(figure.add_subplot(grid[0, :]), history)
    for number, (table, each) in enumerate(norms.items()):
        axes = figure.add_subplot(grid[1 + number // _COLUMNS, number % _COLUMNS])
        axes.stairs(each.counts, each.edges, fill=True)
        axes.set_title(f"{table}: {each.zero_share:.1%} zero rows", fontsize="medium")
        axes.set_xlabel("log10 of the other rows' norm", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, format="png")
