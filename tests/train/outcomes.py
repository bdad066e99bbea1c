"""What a run with checkpoints leaves, to compare two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


@dataclass
class Outcome:
    """The end of a run.

    Attributes:
        metrics: ``metrics.json`` without times and what says that the run was resumed.
        tensors: Weights, states, random states and more of the last checkpoint, by name.
    """

    metrics: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def read_outcome(run: Path) -> Outcome:
    metrics = json.loads((run / "metrics.json").read_text())
    for name in ("seconds", "examples_per_second", "resumed_after_step"):
        metrics.pop(name, None)
    return Outcome(metrics, read_tensors(sorted((run / "checkpoints").iterdir())[-1]))


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    single = checkpoint.parent.with_name("tensors.pt")
    dcp_to_torch_save(checkpoint, single)
    return dict(_flat(torch.load(single, weights_only=True)))


def steps_of(run: Path) -> list[int]:
    """The steps of everything in the folder of the checkpoints; fails on leftovers."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.metrics == expected.metrics
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value
