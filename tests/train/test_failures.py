"""An error on one rank of a run ends the others, with its error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.train.processes import run_command
from torchrec_ext.command.run import EXIT_LOST_RANK
from torchrec_ext.train.loop import Trainer

CONFIG = """
name: failing
data: {dataset: synthetic, examples: 100, features: 2, rows: 30}
model: {type: linear}
optimizer: {type: ftrl, learning_rate: 0.3}
train: {batch_size: 20, abort_seconds: 2}
"""


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("lingers", [False, True], ids=["ends", "lingers"])
def test_an_error_on_one_rank(failing: int, lingers: bool, tmp_path: Path) -> None:
    config, log = tmp_path / "config.yaml", tmp_path / "log"
    config.write_text(CONFIG)
    other = log.with_name(f"log.{1 - failing}")

    def before(rank: int) -> None:
        step, leave = Trainer._step, dist.destroy_process_group

        def fail(self: Trainer, batch: Any) -> float:
            if len(self.history.losses) == 2:
                raise KeyError("in my loss")
            return step(self, batch)

        def linger() -> None:
            """Keeps the connections, so that the other stays blocked, until it was ended."""
            while "blocked" not in other.read_text():
                time.sleep(0.05)
            leave()

        if rank == failing:
            Trainer._step = fail  # type: ignore[method-assign]
            if lingers:
                dist.destroy_process_group = linger

    codes = run_command(2, [str(config), "--output", str(tmp_path / "run")], log, before)
    assert codes[failing] == 1 and codes[1 - failing] == EXIT_LOST_RANK
    own = log.with_name(f"log.{failing}").read_text()
    assert "KeyError: 'in my loss'" in own and f"rank {failing} failed" not in own
    text = other.read_text()
    assert f"rank {failing} failed: KeyError: 'in my loss'" in text
    assert ("blocked" if lingers else "ERROR another rank ended") in text
    assert "in fail" in text, "where it was raised"


@pytest.mark.parametrize("value", ["0", "-1", ".nan", "soon"])
def test_the_key_is_a_number_above_0(value: str, tmp_path: Path) -> None:
    config, log = tmp_path / "config.yaml", tmp_path / "log"
    config.write_text(CONFIG)
    assert run_command(1, [str(config), "--set", f"train.abort_seconds={value}"], log) == [2]
    assert "train.abort_seconds" in log.with_name("log.0").read_text()
