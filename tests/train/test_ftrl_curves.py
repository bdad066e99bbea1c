"""What docs/ftrl.md says about FTRL's extensions on MovieLens-100k, as far as seconds allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.ftrl_curves import FRONTIERS, PRESERVE, Contender, configuration
from tests.distributed.ranks import run_on_ranks
from torchrec_ext.train.data import Split, load

from .test_training import _train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def split() -> Split:
    return load(configuration(PRESERVE[0]).data)


def _aucs(contender: Contender, split: Split, *overrides: str) -> list[float]:
    config = configuration(contender, *overrides)
    evaluations = run_on_ranks(1, _train, config, split)[0][0].evaluations
    return [evaluation.quality.auc for evaluation in evaluations]


def _documented(label: str) -> float:
    """AUC after the first epoch in the table of the page, at the configuration's learning rate."""
    page = (ROOT / "docs" / "ftrl.md").read_text()
    (found,) = re.findall(rf"^\| {re.escape(label)} \| 0\.03 \| (0\.\d+) ", page, re.MULTILINE)
    return float(found)


def test_preserved_weights_train_as_adagrad_does_where_plain_ftrl_stalls(split: Split) -> None:
    plain, preserved, adagrad = (
        _aucs(contender, split, "train.epochs=1")[0] for contender in PRESERVE
    )
    assert plain < 0.52 < 0.54 < preserved
    assert abs(preserved - adagrad) <= 1e-4
    for contender, auc in zip(PRESERVE, (plain, preserved, adagrad), strict=True):
        assert auc == pytest.approx(_documented(contender.label), abs=2e-3)


def test_group_lasso_makes_half_as_many_rows_again_zero_at_the_auc_of_l1(split: Split) -> None:
    aucs, zero_rows = [], []
    for key in ("l1_reg", "l21_reg"):
        config = configuration(FRONTIERS["pairwise dots"], f"optimizer.{key}=0.008")
        ((history, shards, _),) = run_on_ranks(1, _train, config, split)
        aucs.append(history.evaluations[-1].quality.auc)
        # Rows that never occurred have their random weights still.
        zero_rows.append(sum(int((weight == 0).all(dim=1).sum()) for *_, weight in shards))
    assert aucs[1] > aucs[0] - 0.003
    assert zero_rows[1] >= 1.5 * zero_rows[0] > 0


def test_preservation_keeps_rows_from_becoming_zero(split: Split) -> None:
    """Without it the linear model forgets the noise that it started from."""
    shares = []
    for preserve in ("false", "true"):
        overrides = (f"optimizer.preserve_initial_weight={preserve}", "train.epochs=1")
        config = configuration(
            FRONTIERS["linear, random start"], *overrides, "optimizer.l1_reg=75e-5"
        )
        ((_, shards, _),) = run_on_ranks(1, _train, config, split)
        zero = torch.cat([(weight == 0).all(dim=1) for *_, weight in shards])
        shares.append(float(zero.float().mean()))
    assert shares[0] > 0.3 and shares[1] < 0.02
