"""The largest difference between two halves of a twin, and where it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: What one half has after a step, by (quantity, table); ``output`` has no table.
Values = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest ``|ours - theirs| / max(1, |theirs|)`` of one tensor.

    Attributes:
        value: The difference; NaN where one half has a NaN that the other does not have.
        step: After which step, from 1.
        quantity: ``output``, ``weight``, ``weight gradient`` or a state's name.
        table: The table, or an empty string.
        row: Row of the table or of the output.
        column: Column; 0 for states of shape ``[rows]``.
        ours: Our value there.
        theirs: FBGEMM's value there.
    """

    value: float
    step: int
    quantity: str
    table: str
    row: int
    column: int
    ours: float
    theirs: float

    def __str__(self) -> str:
        """One line for reports."""
        place = f"{self.quantity} of table {self.table!r}" if self.table else self.quantity
        return (
            f"{self.value:.3g} in {place} at row {self.row}, column {self.column} after step "
            f"{self.step}: ours {self.ours!r}, FBGEMM's {self.theirs!r}"
        )


def difference(step: int, quantity: str, table: str, ours: Tensor, theirs: Tensor) -> Difference:
    """Compares two tensors of one shape.

    Raises:
        ValueError: The shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{quantity} of table {table!r}: ours has shape {tuple(ours.shape)}, FBGEMM's "
            f"{tuple(theirs.shape)}"
        )
    if ours.numel() == 0:
        return Difference(0.0, step, quantity, table, 0, 0, 0.0, 0.0)
    left, right = ours.detach().double(), theirs.detach().double()
    error = (left - right).abs() / right.abs().clamp(min=1.0)
    both_nan = left.isnan() & right.isnan()
    same_infinity = (left == right) & left.isinf()
    error = error.masked_fill(both_nan | same_infinity, 0.0).nan_to_num(nan=torch.inf)
    at = int(error.argmax())
    row, column = divmod(at, error[0].numel())
    value = float(error.flatten()[at])
    return Difference(
        value if value < torch.inf else torch.nan,
        step,
        quantity,
        table,
        row,
        column,
        float(left.flatten()[at]),
        float(right.flatten()[at]),
    )


def compare(step: int, ours: Values, theirs: Values) -> list[Difference]:
    """Compares everything that the two halves have.

    Raises:
        ValueError: One half has a quantity that the other does not have.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(
            f"ours has {sorted(ours.keys() - theirs.keys())} that FBGEMM's has not, and lacks "
            f"{sorted(theirs.keys() - ours.keys())}"
        )
    return [difference(step, *key, ours[key], theirs[key]) for key in ours]


def largest(differences: Iterable[Difference]) -> Difference:
    """The worst one; NaN is worse than every number."""
    return max(differences, key=lambda found: (found.value != found.value, found.value))


def table_of(differences: Sequence[Difference]) -> str:
    """A printable table: for every quantity and table, the worst difference of all steps."""
    worst: dict[tuple[str, str], Difference] = {}
    for found in differences:
        key = (found.quantity, found.table)
        worst[key] = largest([found, worst[key]]) if key in worst else found
    header = ("quantity", "table", "difference", "step", "row", "column")
    lines = [
        (d.quantity, d.table, f"{d.value:.3g}", str(d.step), str(d.row), str(d.column))
        for d in worst.values()
    ]
    widths = [max(len(line[k]) for line in [header, *lines]) for k in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *lines]
    )
