"""What the cases of bad input have in common: two small tables, a good batch, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_ext import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags

from ..modules import HYPERPARAMETERS, fill, make_module, random_tables, snapshot

SHAPES = [(7, 4), (5, 4)]
NAMES = ["user", "item"]
TABLES = r"tables \['user', 'item'\]"
#: One example with a bag of two lookups in user and one lookup in item.
GOOD = {"indices": torch.tensor([3, 2, 1]), "offsets": torch.tensor([0, 2, 3])}
GOOD_ROWS = ({2, 3}, {1})


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        group: The line of docs/bad_input.md that says what happens.
        name: What is bad.
        given: What replaces arguments of the good batch's lookup.
        error: The error that a forward raises; None: it is accepted.
        message: A pattern of the error.
        rows: The rows of user and item that are updated where it is accepted.
        settings: Keywords of the module.
    """

    group: str
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    error: type[Exception] | None = None
    message: str = ""
    rows: tuple[set[int], set[int]] = GOOD_ROWS
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def build(optimizer: OptimType = OptimType.FTRL, **settings: Any) -> TableBatchedEmbeddingBags:
    """The two tables with random weights."""
    settings = {**HYPERPARAMETERS[optimizer], "table_names": NAMES, **settings}
    module = make_module(optimizer, SHAPES, settings.pop("pooling", "sum"), **settings)
    fill(module, random_tables(SHAPES))
    return module


def changed_rows(before: list[Tensor], after: list[Tensor]) -> tuple[set[int], set[int]]:
    """The rows of user and item of which a bit of the weight or of a state is another.

    Args:
        before: A ``snapshot``: the weights of both tables, then the states of each.
        after: A later one.
    """
    changed: tuple[set[int], set[int]] = (set(), set())
    states = (len(before) - 2) // 2
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        table = number if number < 2 else (number - 2) // states
        bits = [each.contiguous().view(torch.uint8).view(len(each), -1) for each in (old, new)]
        changed[table].update((bits[0] != bits[1]).any(1).nonzero().flatten().tolist())
    return changed


def judge(case: Case) -> None:
    """Looks a bad batch up and trains on it; checks the error or the rows that changed."""
    module = build(**case.settings)
    before, clock = snapshot(module), int(module.iter)
    arguments = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in {**GOOD, **case.given}.items()
    }
    if case.error is None:
        module(**arguments).sum().backward()
        assert changed_rows(before, snapshot(module)) == case.rows
        assert int(module.iter) == clock + 1
        return
    with pytest.raises(case.error, match=case.message):
        module(**arguments)
    assert changed_rows(before, snapshot(module)) == (set(), set())
    assert int(module.iter) == clock
    # And the module is as good as before.
    module(**{name: value.clone() for name, value in GOOD.items()}).sum().backward()
    assert changed_rows(before, snapshot(module)) == GOOD_ROWS
