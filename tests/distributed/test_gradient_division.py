"""What TorchRec's division of gradients by the number of ranks does to each optimizer.

Every figure of docs/gradient_division.md is measured here.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm_ops import set_gradient_division

from torchrec_ext import OptimType
from torchrec_ext.distributed import EmbeddingBagCollectionSharder

from . import models
from .ranks import run_on_ranks
from .updates import update_of

PAGE = Path(__file__).parents[2] / "docs" / "gradient_division.md"
TABLE = models.Table("t", 16, 8, ("f",))
ROWS = {"one": 0, "all": 9}  # looked up by rank 0 only, and by every rank
GRADIENT = 0.5  # of every rank's loss by each element that it looks up
RUNS = {  # by the header of the page's columns: ranks, division
    "1 rank": (1, True),
    "2 ranks": (2, True),
    "4 ranks": (4, True),
    "2, off": (2, False),
    "4, off": (4, False),
}
CASES: dict[str, tuple[OptimType, dict[str, Any]]] = {
    "EXACT_SGD": (OptimType.EXACT_SGD, {"learning_rate": 1.0}),
    "EXACT_SGD, max_gradient 0.2": (
        OptimType.EXACT_SGD,
        {"learning_rate": 1.0, "gradient_clipping": True, "max_gradient": 0.2},
    ),
    "EXACT_ADAGRAD": (OptimType.EXACT_ADAGRAD, {"learning_rate": 1.0}),
    "FTRL": (OptimType.FTRL, {"learning_rate": 1.0, "ftrl_beta": 1.0}),
    "FTRL, l1_reg 0.3": (
        OptimType.FTRL,
        {"learning_rate": 1.0, "ftrl_beta": 1.0, "l1_reg": 0.3},
    ),
    "ADAM": (OptimType.ADAM, {"learning_rate": 1.0}),
    "ADAM, eps 0.1": (OptimType.ADAM, {"learning_rate": 1.0, "eps": 0.1}),
}
SHARDINGS = ("table_wise", "row_wise", "column_wise")


class _Linear(models.Model):
    """A loss whose gradient by every looked up element is the same on every rank."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return GRADIENT * self.ebc(features).values().sum()


def _measure(divides: bool) -> dict[tuple[str, str], list]:
    set_gradient_division(divides)
    found = {}
    rows = [ROWS["all"], *([ROWS["one"]] if dist.get_rank() == 0 else [])]
    lengths = [1] * len(rows) + [0] * (2 - len(rows))
    for case, (optimizer, settings) in CASES.items():
        for sharding_type in SHARDINGS:
            sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, **settings})
            model = _Linear((TABLE,))
            plan = models.plan_for(model, [sharder], sharding_type, (TABLE,))
            sharded = models.shard(model, [sharder], plan)
            models.write_weights(sharded, {"t": torch.zeros(TABLE.rows, TABLE.dim)})
            batch = KeyedJaggedTensor(["f"], torch.tensor(rows), lengths=torch.tensor(lengths))
            sharded(batch).backward()
            found[case, sharding_type] = models.read_weights(sharded)
    return found


@functools.cache
def _moves(run: str) -> dict[tuple[str, str, str], float]:
    """How far each case moved each row, by case, sharding type and name of the row."""
    ranks, divides = RUNS[run]
    answers = run_on_ranks(ranks, _measure, divides)
    moves = {}
    for case, sharding_type in answers[0]:
        weights = models.assemble([answer[case, sharding_type] for answer in answers])["t"]
        untouched = torch.ones(TABLE.rows, dtype=torch.bool)
        for name, row in ROWS.items():
            assert (weights[row] == weights[row, 0]).all()
            moves[case, sharding_type, name] = 0.0 - float(weights[row, 0])
            untouched[row] = False
        assert not weights[untouched].any()
    return moves


def _expected(case: str, run: str, row: str) -> float:
    """In float64, from the gradients that arrive."""
    ranks, divides = RUNS[run]
    optimizer, settings = CASES[case]
    settings = dict(settings)
    settings.pop("gradient_clipping", None)
    bound = settings.pop("max_gradient", float("inf"))
    arriving = min(GRADIENT / (ranks if divides else 1), bound)
    lookups = ranks if row == "all" else 1
    weight = torch.zeros(1, 1, dtype=torch.float64)
    gradient = torch.full((1, 1), arriving * lookups, dtype=torch.float64)
    update_of(optimizer, **settings)(weight, gradient, {}, 1)
    return 0.0 - float(weight)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("sharding_type", SHARDINGS)
def test_gradients_arrive_divided(run, sharding_type):
    for case in CASES:
        for row in ROWS:
            found = _moves(run)[case, sharding_type, row]
            assert abs(found - _expected(case, run, row)) <= 1e-6, (case, row)


def test_l1_bites_where_division_makes_a_gradient_smaller_than_it():
    """A row of one rank: 0.5 exceeds l1_reg 0.3, and a half or a quarter of it does not."""
    moves = {run: _moves(run)["FTRL, l1_reg 0.3", "table_wise", "one"] for run in RUNS}
    assert moves["1 rank"] == moves["2, off"] == moves["4, off"] > 0.1
    assert moves["2 ranks"] == moves["4 ranks"] == 0.0


def test_clipping_sees_the_divided_gradient():
    """So a bound of 0.2 bites at 0.2 W in the gradient of a rank's loss."""
    moves = {run: _moves(run)["EXACT_SGD, max_gradient 0.2", "row_wise", "one"] for run in RUNS}
    for run in ("1 rank", "2 ranks", "2, off", "4, off"):
        assert moves[run] == pytest.approx(0.2)
    assert moves["4 ranks"] == 0.125


def test_adam_does_not_see_the_scale_unless_eps_is_as_large():
    for row in ROWS:
        moves = [_moves(run)["ADAM", "column_wise", row] for run in RUNS]
        assert max(moves) - min(moves) <= 1e-6
    wide = [_moves(run)["ADAM, eps 0.1", "column_wise", "one"] for run in RUNS]
    assert max(wide) - min(wide) > 0.2


@pytest.mark.parametrize("row", ROWS)
def test_the_page_has_these_figures(row):
    section = PAGE.read_text().split(f"<!-- row of {row} -->\n")[1].split("\n\n")[0]
    header, _, *lines = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines()
    ]
    assert header[1:] == list(RUNS)
    figures = {case: values for case, *values in lines}
    assert list(figures) == list(CASES)
    for case, values in figures.items():
        found = [f"{_moves(run)[case, 'table_wise', row]:.3f}" for run in RUNS]
        assert values == found, case
