"""The parity command: its table, exit codes and errors."""

from pathlib import Path

import pytest
import torch.distributed as dist

from torchrec_ext import cli
from torchrec_ext.command.config_file import load_config
from torchrec_ext.command.errors import AgreedError
from torchrec_ext.command.ranks import Ranks
from torchrec_ext.twin import Difference, command

from ..distributed.ranks import run_on_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
BARE = str(CONFIGS / "parity_adagrad.yaml")
SHARDED = str(CONFIGS / "parity_rowwise_adagrad_sharded.yaml")


def _parity(config: str, *overrides: str) -> int:
    return cli.main(["parity", config, *(f"--set={override}" for override in overrides)])


def _on_rank(config: str, overrides: list[str]) -> int:
    """The work of one rank, whose process group exists already."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_world_size())
    return command.compare_halves(load_config(command.ParityConfig, config, overrides), ranks)


def _error(capfd: pytest.CaptureFixture[str], config: str, *overrides: str) -> str:
    assert _parity(config, *overrides) == 2
    output, error = capfd.readouterr()
    assert output == "" and error.startswith("ERROR ") and error.count("\n") == 1
    return error


def test_bare_modules_are_within_the_tolerance(capfd: pytest.CaptureFixture[str]) -> None:
    assert _parity(BARE) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["quantity", "table", "difference", "step", "row", "column"]
    assert [line.split()[:2] for line in lines[2:8]] == [
        [quantity, table] for quantity in ("weight", "sum") for table in ("country", "item", "hour")
    ]
    assert lines[-1].startswith("within the tolerance of 1e-05: ")


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise", "table_wise"])
def test_sharded_collections(sharding_type, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on_ranks(2, _on_rank, SHARDED, [f"sharding_type={sharding_type}"]) == [0, 0]
    output = capfd.readouterr().out
    assert output.count("within the tolerance") == 1
    assert "rank 0" in output and "rank 1" in output


def test_a_difference_above_the_tolerance_ends_with_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert _parity(BARE, "tolerance=1e-9") == 1
    assert "above the tolerance of 1e-09" in capfd.readouterr().out


def test_nan_is_above_every_tolerance(monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    found = Difference(float("nan"), 1, "weight", "item", 0, 0, float("nan"), 0.0)
    monkeypatch.setattr(command.BareTwin, "run", lambda self, steps: iter([found]))
    assert _parity(BARE, "tolerance=1e30") == 1


def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert "FBGEMM has no FTRL" in _error(capfd, BARE, "optimizer.type=ftrl")
    assert "optimizer.type: fbgemm_exact_sgd is FBGEMM's half of the twin; write exact_sgd" in (
        _error(capfd, BARE, "optimizer={type: fbgemm_exact_sgd}")
    )
    assert "tables[1].rows: missing; tables[1].row: unknown key; did you mean tables[1].rows?" in (
        _error(capfd, BARE, "tables=[{name: a, rows: 3, dim: 4}, {name: b, row: 3, dim: 4}]")
    )
    assert "tables[0].dim" in _error(capfd, BARE, "tables=[{name: a, rows: 3, dim: 5}]")
    assert "unique names" in _error(
        capfd, BARE, "tables=[{name: a, rows: 3, dim: 4, features: [x, x]}]"
    )
    assert "needs tables of one dim" in _error(capfd, BARE, "pooling=none")
    assert "cannot be built: table 'item'" in _error(
        capfd, SHARDED, "sharding_type=grid_shard", "pooling=mean", "weighted=false"
    )
    huge = "tables=[{name: a, rows: 2000000000, dim: 2048}]"
    assert "cannot be built" in _error(capfd, BARE, huge)
    assert "tables[0].name" in _error(capfd, BARE, "tables=[{name: a.b, rows: 3, dim: 4}]")
    assert "weighted=True" in _error(capfd, BARE, "weighted=true", "pooling=mean")


def test_several_ranks_need_a_sharding_type() -> None:
    with pytest.raises(AgreedError, match="sharding_type: missing; 2 ranks need one"):
        run_on_ranks(2, _on_rank, BARE, [])
