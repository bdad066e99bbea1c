"""The command as a person starts it: processes, exit codes, streams and files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_ext import cli

ROOT = Path(__file__).parents[2]
CONFIG = """
name: tiny
data: {dataset: synthetic, examples: 400, features: 2, rows: 30}
model: {type: wide_deep, hidden: [8]}
optimizer: {type: ftrl, learning_rate: 0.3, ftrl_beta: 0.01, l1_reg: 0.01}
deep_optimizer: {type: exact_adagrad}
train: {batch_size: 32, epochs: 2}
"""
TRAIN = ["-m", "torchrec_ext.cli", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


def _start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _metrics(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def test_one_rank_and_two_ranks_train_report_and_write_the_same(
    config: str, tmp_path: Path
) -> None:
    one = _start([*TRAIN, config, "--output", "one"], tmp_path)
    two = _start([*TORCHRUN, *TRAIN[:2], "train", config, "--output", "two"], tmp_path)
    for process, ranks in ((one, 1), (two, 2)):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        # Only one rank prints, and it prints everything once.
        assert output.count(f"Sharding plan for {ranks} rank(s)") == 1
        assert output.count("Memory of the plan in bytes") == 1
        assert output.count("all tables") == ranks
        assert output.count("test AUC 0.") == 1
        assert output.count("all wide") == 1
        assert "examples/s, loss=" in errors
        assert "Traceback" not in errors
    single, double = _metrics(tmp_path / "one"), _metrics(tmp_path / "two")
    assert (single["world_size"], double["world_size"]) == (1, 2)
    assert single["steps"] == double["steps"] == 20
    assert single["losses"] == pytest.approx(double["losses"], abs=1e-5)
    assert single["zeros"] == double["zeros"]
    assert single["evaluation"]["auc"] == pytest.approx(double["evaluation"]["auc"], abs=1e-3)
    for folder in ("one", "two"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert names == {"metrics.json", "config.yaml", "curves.png"}


def test_ctrl_c_ends_with_130_and_leaves_the_results_so_far(config: str, tmp_path: Path) -> None:
    arguments = [*TRAIN, config, "--set", "train.epochs=1000000", "--output", "run"]
    process = _start(arguments, tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 10:" in line:
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after step" in errors
    assert "Traceback" not in errors
    assert "all wide" in output
    metrics = _metrics(tmp_path / "run")
    assert metrics["interrupted"] is True
    assert metrics["steps"] >= 10
    assert metrics["evaluation"]["step"] >= 10


def test_mistakes_are_one_line_on_stderr(config: str, tmp_path: Path) -> None:
    override = ["--set", "train.epoch=3"]
    one = _start(["-m", "torchrec_ext.train", config, *override], tmp_path)
    two = _start([*TORCHRUN, *TRAIN[:2], "train", config, *override], tmp_path)
    expected = f"ERROR {config}: train.epoch: unknown key; did you mean train.epochs?\n"
    output, errors = one.communicate(timeout=60)
    assert (one.returncode, output, errors) == (2, "", expected)
    output, errors = two.communicate(timeout=60)
    assert two.returncode != 0
    assert output == ""
    # The rest is torchrun's own summary.
    assert errors.count(expected) == 1
    assert "torchrec_ext/train" not in errors


def test_commands_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--help"])
    assert raised.value.code == 0
    listed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"{name} " in listed and command.summary in listed
    with pytest.raises(SystemExit) as raised:
        cli.main(["trian"])
    assert raised.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for name in [name for name in sys.modules if name.startswith("torchrec_ext.train")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["train", "any.yaml"]) == cli.EXIT_NOT_INSTALLED
    error = capsys.readouterr().err
    assert "'tqdm' is not installed" in error and "torchrec_ext[train]" in error


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main([command, "--help"])
    assert raised.value.code == 0
    assert f"usage: torchrec-ext {command}" in capsys.readouterr().out
