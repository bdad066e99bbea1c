"""What docs/ftrl.md says about FTRL's extensions on MovieLens-100k, as far as seconds allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.ftrl_curves import FRONTIERS, PRESERVE, Contender, configuration, zero_row_share
from tests.distributed.ranks import run_on_ranks
from torchrec_ext.train.data import Split, load

from .test_training import _train

PAGE = (Path(__file__).parents[2] / "docs" / "ftrl.md").read_text()


@pytest.fixture(scope="module")
def split() -> Split:
    return load(configuration(PRESERVE[0]).data)


def _run(contender: Contender, split: Split, *overrides: str) -> tuple[float, float]:
    """Train; give the last test AUC and the share of zero rows among touched ones."""
    config = configuration(contender, *overrides)
    ((history, shards, _),) = run_on_ranks(1, _train, config, split)
    touched = {name: torch.zeros(rows).bool() for name, rows in split.train.rows().items()}
    for name, bags in split.train.features.items():
        touched[name][bags.values[bags.offsets[0] : bags.offsets[-1]]] = True
    weights = [(table, weight) for table, _, _, weight in shards]
    zero_rows = zero_row_share(weights, touched, config.model.type)
    return history.evaluations[-1].quality.auc, zero_rows


def _row(label: str) -> list[float]:
    """The numbers of the only line of the page's tables that begins with the label."""
    (line,) = re.findall(rf"^\| {re.escape(label)} \| (.+) \|$", PAGE, re.MULTILINE)
    cells = line.split(" | ")
    return [float(cell[:-1]) / 100 if cell.endswith("%") else float(cell) for cell in cells]


def test_zero_rows_are_counted_among_touched_ones_of_tables_that_are_not_wide() -> None:
    weights = torch.tensor([[0.0, -0.0], [0.0, 1.0], [0.0, 0.0], [2.0, 3.0]])
    touched = {"a": torch.tensor([True, True, False, True]), "b": torch.tensor([True] * 4)}
    shards = [("wide_a", weights), ("factor_a", weights), ("factor_b", weights)]
    assert zero_row_share(shards, touched, "wide_deep") == pytest.approx(3 / 7)
    assert zero_row_share(shards[:1], touched, "linear") == pytest.approx(1 / 3)


def test_preserved_weights_train_as_adagrad_does_where_plain_ftrl_stalls(split: Split) -> None:
    plain, preserved, adagrad = (
        _run(contender, split, "train.epochs=1")[0] for contender in PRESERVE
    )
    assert plain < 0.52 < 0.54 < preserved
    assert abs(preserved - adagrad) <= 1e-4
    for contender, auc in zip(PRESERVE, (plain, preserved, adagrad), strict=True):
        assert auc == pytest.approx(_row(f"{contender.label} | 0.03")[0], abs=2e-3)


def test_group_lasso_makes_half_as_many_rows_again_zero_at_the_auc_of_l1(split: Split) -> None:
    found = {}
    for key in ("l1_reg", "l21_reg"):
        found[key] = _run(FRONTIERS["pairwise dots"].contender, split, f"optimizer.{key}=0.008")
        assert found[key] == pytest.approx(_row(f"pairwise dots, `{key}` 0.008")[2:], abs=5e-3)
    (l1_auc, l1_rows), (l21_auc, l21_rows) = found.values()
    assert l21_auc > l1_auc - 0.003
    assert l21_rows >= 1.5 * l1_rows > 0


def test_half_the_rows_of_a_linear_model_become_zero_at_little_loss(split: Split) -> None:
    contender = FRONTIERS["linear, random start"].contender
    free_auc, free_rows = _run(contender, split)
    auc, rows = _run(contender, split, "optimizer.l21_reg=0.00075")
    assert free_rows == 0 and rows >= 0.5
    assert auc > free_auc - 0.01
    assert [auc, rows] == pytest.approx(
        _row("linear, random start, `l21_reg` 0.00075")[2:], abs=5e-3
    )


def test_preservation_keeps_rows_from_becoming_zero(split: Split) -> None:
    """Without it the linear model forgets the noise that it started from."""
    shares = [
        _run(
            FRONTIERS["linear, random start"].contender,
            split,
            *(f"optimizer.preserve_initial_weight={preserve}", "optimizer.l1_reg=75e-5"),
            "train.epochs=1",
        )[1]
        for preserve in ("false", "true")
    ]
    assert shares[0] > 0.3 and shares[1] < 0.02
