"""Embedding lookups and optimizer updates in float64, written from the formulas alone.

Imports nothing of torchrec_ext. Tables are ``[rows, D]`` float64 tensors; a batch is TorchRec's:
indices and offsets, feature by feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


#: ``update(w, g, states, step, **hyperparameters)`` gives the new weights ``[rows, D]``, puts new
#: tensors into ``states``; ``step`` is the number of this update, from 1.
Update = Callable[..., Tensor]


def exact_sgd(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    step: int,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Tensor:
    """torch.optim.SGD's, with decoupled decay."""
    w = w * (1 - learning_rate * weight_decay)
    if momentum == 0.0:
        return w - learning_rate * g
    states[0] = momentum * states[0] + (1 if step == 1 else 1 - dampening) * g
    return w - learning_rate * (g + momentum * states[0] if nesterov else states[0])


def exact_adagrad(
    w: Tensor, g: Tensor, states: list[Tensor], step: int, *, learning_rate: float, eps: float
) -> Tensor:
    states[0] = states[0] + g * g
    return w - learning_rate * g / (states[0].sqrt() + eps)


def decayed(
    w: Tensor, g: Tensor, learning_rate: float, weight_decay: float, mode: str
) -> tuple[Tensor, Tensor]:
    """Weight and gradient after the weight decay, which sees the previous weight."""
    if mode == "L2":
        return w, g + weight_decay * w
    return w * (1 - learning_rate * weight_decay), g


def exact_rowwise_adagrad(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    step: int,
    *,
    learning_rate: float,
    eps: float,
    weight_decay: float = 0.0,
    weight_decay_mode: str = "DECOUPLE",
) -> Tensor:
    """``states[0]`` is ``[rows]``."""
    w, g = decayed(w, g, learning_rate, weight_decay, weight_decay_mode)
    states[0] = states[0] + (g * g).mean(dim=-1)
    return w - learning_rate * g / (states[0].sqrt() + eps).unsqueeze(-1)


def adam(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    step: int,
    *,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mode: str = "DECOUPLE",
    bias_correction: str = "global",
) -> Tensor:
    """Kingma and Ba, ICLR 2015, Algorithm 1; decay as Loshchilov and Hutter, ICLR 2019."""
    w, g = decayed(w, g, learning_rate, weight_decay, weight_decay_mode)
    t: Tensor | int = step
    if bias_correction == "per_row":
        states[2] = states[2] + 1
        t = states[2].unsqueeze(-1)
    states[0] = beta1 * states[0] + (1 - beta1) * g
    states[1] = beta2 * states[1] + (1 - beta2) * g * g
    mean, square = states[0] / (1 - beta1**t), states[1] / (1 - beta2**t)
    return w - learning_rate * mean / (square.sqrt() + eps)


def partial_rowwise_adam(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    step: int,
    *,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mode: str = "DECOUPLE",
) -> Tensor:
    """``states[1]`` is ``[rows]``."""
    w, g = decayed(w, g, learning_rate, weight_decay, weight_decay_mode)
    states[0] = beta1 * states[0] + (1 - beta1) * g
    states[1] = beta2 * states[1] + (1 - beta2) * (g * g).mean(dim=-1)
    mean, square = states[0] / (1 - beta1**step), states[1] / (1 - beta2**step)
    return w - learning_rate * mean / (square.sqrt() + eps).unsqueeze(-1)


def lamb(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    step: int,
    *,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Tensor:
    """You et al., ICLR 2020, Algorithm 2, with a trust ratio for each row; 1 where a norm is 0."""
    states[0] = beta1 * states[0] + (1 - beta1) * g
    states[1] = beta2 * states[1] + (1 - beta2) * g * g
    mean, square = states[0] / (1 - beta1**step), states[1] / (1 - beta2**step)
    direction = mean / (square.sqrt() + eps) + weight_decay * w
    weight_norm = w.norm(dim=-1, keepdim=True)
    direction_norm = direction.norm(dim=-1, keepdim=True)
    ratio = weight_norm / direction_norm
    ratio[(weight_norm == 0) | (direction_norm == 0)] = 1.0
    return w - learning_rate * ratio * direction


def ftrl(
    w: Tensor,
    g: Tensor,
    states: list[Tensor],
    step: int,
    *,
    learning_rate: float,
    ftrl_beta: float = 0.0,
    l1_reg: float = 0.0,
    l2_reg: float = 0.0,
    learning_rate_power: float = -0.5,
    preserve_initial_weight: bool = False,
    l2_shrinkage_reg: float = 0.0,
    multiply_linear_by_lr: bool = False,
    l21_reg: float = 0.0,
) -> Tensor:
    """McMahan et al., KDD 2013, Algorithm 1; ``states`` are z and n.

    With ``multiply_linear_by_lr`` the first state is z times the learning rate. With
    ``preserve_initial_weight`` a z of -0 says that there was no update before.
    """
    factor = learning_rate if multiply_linear_by_lr else 1.0
    linear, accum = states[0] / factor, states[1]
    p = -learning_rate_power
    before, after = accum**p, (accum + g * g) ** p
    radius = l21_reg * math.sqrt(w.shape[-1])
    if preserve_initial_weight:
        new = (linear == 0.0) & linear.signbit()
        v = w * ((ftrl_beta + before) / learning_rate + l2_reg)
        norm = v.norm(dim=-1, keepdim=True)
        stretched = v * torch.where(norm == 0.0, 1.0, 1.0 + radius / norm)
        linear = torch.where(new, -stretched - w.sign() * l1_reg, linear)
    linear = linear + g + 2.0 * l2_shrinkage_reg * w - (after - before) / learning_rate * w
    states[:] = [linear * factor + 0.0, accum + g * g]
    u = torch.where(linear.abs() <= l1_reg, 0.0, linear.sign() * l1_reg - linear)
    norm = u.norm(dim=-1, keepdim=True)
    u = torch.where(norm <= radius, 0.0, u * (1.0 - radius / norm))
    denominator = (ftrl_beta + after) / learning_rate + l2_reg
    return torch.where(denominator == 0.0, w, u / denominator)


UPDATES: dict[str, Update] = {
    "EXACT_SGD": exact_sgd,
    "EXACT_ADAGRAD": exact_adagrad,
    "EXACT_ROWWISE_ADAGRAD": exact_rowwise_adagrad,
    "FTRL": ftrl,
    "ADAM": adam,
    "PARTIAL_ROWWISE_ADAM": partial_rowwise_adam,
    "LAMB": lamb,
}


def train_step(
    update: Update,
    tables: list[Tensor],
    states: list[list[Tensor]],
    feature_tables: Sequence[int],
    batch: Batch,
    gradient: Tensor,
    step: int,
    **hyperparameters: Any,
) -> None:
    """Updates tables and states (``[table][state]``) in place, one step for every touched row."""
    for table, sums in enumerate(row_gradients(tables, feature_tables, batch, gradient)):
        for row, g in sums.items():
            selected = [state[row : row + 1].clone() for state in states[table]]
            new = update(tables[table][row : row + 1], g[None], selected, step, **hyperparameters)
            tables[table][row] = new[0]
            for state, value in zip(states[table], selected, strict=True):
                state[row] = value[0]
