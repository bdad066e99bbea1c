"""A run folder holds what happened, also when little happened."""

import json
from pathlib import Path

import pytest

from torchrec_ext.command.errors import UserError
from torchrec_ext.train.config import Config
from torchrec_ext.train.loop import Evaluation, History
from torchrec_ext.train.metrics import Quality
from torchrec_ext.train.report import (
    format_results,
    make_run_folder,
    summarise,
    write_results,
)
from torchrec_ext.train.tables import ZeroCount, total_of

ZEROS = {
    "wide_a": ZeroCount(touched_zeros=2, touched=8, zeros=6, total=12),
    "wide_b": ZeroCount(touched_zeros=4, touched=4, zeros=4, total=4),
    "deep_a": ZeroCount(touched_zeros=0, touched=32, zeros=1, total=48),
}
CONFIG = Config.model_validate(
    {
        "name": "run",
        "data": {"dataset": "synthetic"},
        "model": {"type": "linear"},
        "optimizer": {"type": "ftrl"},
        "train": {"batch_size": 10},
    }
)
HISTORY = History(
    losses=[0.5, 0.25],
    evaluations=[Evaluation(2, Quality(0.75, 0.5, 0.4, 20), ZEROS)],
    seconds=4.0,
    zeros=ZEROS,
)


def test_metrics_hold_quality_zeros_and_speed(tmp_path: Path) -> None:
    write_results(tmp_path, CONFIG, HISTORY, {"name": "run", "interrupted": False})
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["name"] == "run"
    assert metrics["steps"] == 2
    assert metrics["examples_per_second"] == 5.0
    assert metrics["losses"] == [0.5, 0.25]
    assert metrics["evaluation"]["auc"] == 0.75
    assert metrics["evaluation"]["log_loss"] == 0.5
    assert metrics["evaluation"]["wide_zero_share_of_touched"] == 0.5
    assert metrics["zeros"]["wide_a"]["touched_share"] == 0.25
    assert metrics["zeros"]["wide_a"]["share"] == 0.5
    assert metrics["zeros"]["all_wide"]["touched"] == 12
    assert metrics["zeros"]["all_deep"]["total"] == 48
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_is_written_too(tmp_path: Path) -> None:
    write_results(tmp_path, CONFIG, History(), {"interrupted": True})
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["evaluation"] is None
    assert metrics["examples_per_second"] is None
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_an_undefined_auc_is_written_as_null() -> None:
    evaluation = Evaluation(1, Quality(None, 0.5, 1.0, 20), {})
    summary = summarise(CONFIG, History(losses=[1.0], evaluations=[evaluation]))
    assert summary["evaluation"]["auc"] is None
    text = format_results(CONFIG, History(evaluations=[evaluation]), [])
    assert text.startswith("test AUC undefined, log loss 0.5000 after step 1")


def test_totals_add_tables_up() -> None:
    assert total_of(ZEROS, "wide_") == ZeroCount(6, 12, 10, 16)
    assert total_of({}, "wide_") == ZeroCount(0, 0, 0, 0)
    assert total_of({}, "wide_").share == 0.0


def test_results_are_laid_out_in_the_order_of_the_data() -> None:
    lines = format_results(CONFIG, HISTORY, ["b", "a"]).splitlines()
    assert lines[0] == "test AUC 0.7500, log loss 0.5000 after step 2 (20 examples, 40.0% positive)"
    assert [line.split()[0] for line in lines[2:]] == ["wide_b", "wide_a", "all", "deep_a", "all"]
    assert lines[3].split() == ["wide_a", "2/8", "25.0%", "6/12", "50.0%"]
    assert lines[4].split() == ["all", "wide", "6/12", "50.0%", "10/16", "62.5%"]


def test_factor_tables_have_a_total_of_their_own() -> None:
    zeros = {"wide_a": ZeroCount(1, 2, 3, 4), "factor_a": ZeroCount(0, 6, 3, 12)}
    evaluation = Evaluation(1, Quality(0.5, 0.5, 0.5, 2), zeros)
    history = History(losses=[1.0], evaluations=[evaluation], zeros=zeros)
    lines = format_results(CONFIG, history, ["a"]).splitlines()
    assert lines[-1].split() == ["all", "factor", "0/6", "0.0%", "3/12", "25.0%"]
    assert summarise(CONFIG, history)["zeros"]["all_factor"]["total"] == 12


def test_run_folders_are_new_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = make_run_folder(None, "run"), make_run_folder(None, "run")
    assert first != second
    assert first.parent == second.parent == Path("runs")
    assert first.name.startswith("run-")
    assert make_run_folder("given/deep", "run").is_dir()
    assert make_run_folder("given/deep", "run").is_dir()
    Path("given/deep/file").touch()
    with pytest.raises(UserError, match="given/deep is not empty"):
        make_run_folder("given/deep", "run")
    with pytest.raises(UserError, match="cannot create the output folder"):
        make_run_folder("given/deep/file", "run")
