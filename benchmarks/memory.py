"""How much memory a backward takes beyond the tables."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.contenders import Fused, ours
from benchmarks.shapes import Indices, Shape
from torchrec_ext import OptimType

_CASES = {
    "100,000 rows, 40,960 lookups": Shape(1, 100_000, 64, 2048, 20),
    "2,000,000 rows, 40,960 lookups": Shape(1, 2_000_000, 64, 2048, 20),
    "100,000 rows, 327,680 lookups": Shape(1, 100_000, 64, 16384, 20),
}


@dataclass(frozen=True)
class Memory:
    """Extra bytes by case, and as text."""

    figures: dict[str, int]
    text: str


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _peak_of_backward(shape: Shape) -> int:
    """The rise of the peak resident size during a backward whose rows are resident already."""
    contender = ours(OptimType.FTRL)(shape)
    assert isinstance(contender, Fused)
    for states in contender.module.split_optimizer_states():
        for state in states:
            state.fill_(0.1)  # touches every page
    batch, offsets = Indices(shape, "uniform").draw(), shape.offsets()
    output = contender.forward(batch, offsets)
    gradient = torch.randn_like(output)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free must count as new when it is used
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    contender.backward(output, gradient)
    return max(_status("VmHWM") - before, 0)


def report_memory() -> Memory:
    """Measure the cases."""
    _peak_of_backward(next(iter(_CASES.values())))  # starts threads and fills pools
    figures = {name: _peak_of_backward(shape) for name, shape in _CASES.items()}
    lines = [f"  {name:34}{figure / 2**20:8.1f} MiB" for name, figure in figures.items()]
    return Memory(figures, "\nextra memory of our FTRL backward, dim 64\n" + "\n".join(lines))
