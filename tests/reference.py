"""Embedding lookups and optimizer updates in float64, written from the formulas alone.

Imports nothing of torchrec_ext. Tables are ``[rows, D]`` float64 tensors; a batch is TorchRec's:
indices and offsets, feature by feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A batch of lookups; ``pooling`` is sum, mean or none."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    pooling: str = "sum"

    def bags(self, features: int) -> list[list[tuple[int, int]]]:
        """``[feature][example]``: where the bag begins and ends in ``indices``."""
        ends = self.offsets.tolist()
        examples = (len(ends) - 1) // features
        bounds = list(zip(ends, ends[1:], strict=False))
        return [bounds[f * examples : (f + 1) * examples] for f in range(features)]

    def scale(self, lookup: int, begin: int, end: int) -> float:
        """What one lookup's row is multiplied by in its bag."""
        weight = 1.0 if self.weights is None else float(self.weights[lookup])
        return weight / (end - begin) if self.pooling == "mean" else weight


def lookup(tables: Sequence[Tensor], feature_tables: Sequence[int], batch: Batch) -> Tensor:
    """The output: ``[examples, sum of dims]``, or ``[lookups, D]`` without pooling."""
    if batch.pooling == "none":
        rows = [
            tables[table][int(batch.indices[i])]
            for table, bags in zip(feature_tables, batch.bags(len(feature_tables)), strict=True)
            for begin, end in bags
            for i in range(begin, end)
        ]
        return torch.stack(rows) if rows else torch.zeros(0, tables[0].shape[1]).double()
    columns = []
    for table, bags in zip(feature_tables, batch.bags(len(feature_tables)), strict=True):
        column = torch.zeros(len(bags), tables[table].shape[1], dtype=torch.float64)
        for example, (begin, end) in enumerate(bags):
            for i in range(begin, end):
                row = tables[table][int(batch.indices[i])]
                column[example] += batch.scale(i, begin, end) * row
        columns.append(column)
    return torch.cat(columns, dim=1)


def row_gradients(
    tables: Sequence[Tensor], feature_tables: Sequence[int], batch: Batch, gradient: Tensor
) -> list[dict[int, Tensor]]:
    """For each table, the summed gradient of every row that the batch looks up."""
    sums: list[dict[int, Tensor]] = [{} for _ in tables]
    gradient = gradient.double()
    first = 0
    for table, bags in zip(feature_tables, batch.bags(len(feature_tables)), strict=True):
        dim = tables[table].shape[1]
        for example, (begin, end) in enumerate(bags):
            for i in range(begin, end):
                row = int(batch.indices[i])
                g = gradient[i] if batch.pooling == "none" else gradient[example]
                part = g if batch.pooling == "none" else g[first : first + dim]
                part = part * batch.scale(i, begin, end)
                sums[table][row] = sums[table].get(row, torch.zeros_like(part)) + part
        first += dim
    return sums


Update = Callable[..., Tensor]


def exact_sgd(w: Tensor, g: Tensor, states: list[Tensor], *, learning_rate: float) -> Tensor:
    return w - learning_rate * g


def exact_adagrad(
    w: Tensor, g: Tensor, states: list[Tensor], *, learning_rate: float, eps: float = 1e-8
) -> Tensor:
    states[0] += g * g
    return w - learning_rate * g / (states[0].sqrt() + eps)


def exact_rowwise_adagrad(
    w: Tensor, g: Tensor, states: list[Tensor], *, learning_rate: float, eps: float = 1e-8
) -> Tensor:
    """``states[0]`` is ``[rows]``, ``w`` and ``g`` are ``[rows, D]``."""
    states[0] += (g * g).mean(dim=-1)
    return w - learning_rate * g / (states[0].sqrt() + eps).unsqueeze(-1)


def ftrl(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    *,
    learning_rate: float,
    ftrl_beta: float = 0.0,
    l1_reg: float = 0.0,
    l2_reg: float = 0.0,
    learning_rate_power: float = -0.5,
) -> Tensor:
    """McMahan et al., KDD 2013, Algorithm 1; ``states`` are z and n."""
    linear, accum = states
    p = -learning_rate_power
    before = accum**p
    accum += g * g
    after = accum**p
    linear += g - (after - before) / learning_rate * w
    denominator = (ftrl_beta + after) / learning_rate + l2_reg
    solution = (linear.sign() * l1_reg - linear) / denominator
    solution = torch.where(linear.abs() <= l1_reg, torch.zeros_like(w), solution)
    return torch.where(denominator == 0.0, w, solution)


UPDATES: dict[str, Update] = {
    "EXACT_SGD": exact_sgd,
    "EXACT_ADAGRAD": exact_adagrad,
    "EXACT_ROWWISE_ADAGRAD": exact_rowwise_adagrad,
    "FTRL": ftrl,
}


def train_step(
    update: Update,
    tables: list[Tensor],
    states: list[list[Tensor]],
    feature_tables: Sequence[int],
    batch: Batch,
    gradient: Tensor,
    **hyperparameters: float,
) -> None:
    """Updates tables and states (``[table][state]``) in place, one step for every touched row."""
    for table, sums in enumerate(row_gradients(tables, feature_tables, batch, gradient)):
        for row, g in sums.items():
            selected = [state[row : row + 1].clone() for state in states[table]]
            new = update(tables[table][row : row + 1], g[None], selected, **hyperparameters)
            tables[table][row] = new[0]
            for state, value in zip(states[table], selected, strict=True):
                state[row] = value[0]
