"""A rank is killed during a save, and the run goes on from the newest checkpoint as if it had not.

The moments are operations on files and on other ranks: the process kills itself, with SIGKILL,
before one of them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.outcomes import Outcome, assert_same_bits, read_outcome, steps_of
from tests.train.processes import run_command
from torchrec_ext.command.ranks import Ranks
from torchrec_ext.command.run import EXIT_LOST_RANK
from torchrec_ext.train import checkpoint_folder, command
from torchrec_ext.train.checkpoint import Checkpoints

# Five steps an epoch. The third and fourth saves, after steps 6 and 8, remove an older checkpoint.
CONFIG = """
name: killed
data: {dataset: synthetic, examples: 100, features: 2, rows: 30}
model: {type: wide_deep, hidden: [8]}
optimizer: {type: ftrl, learning_rate: 0.3, ftrl_beta: 0.01, l1_reg: 0.01}
deep_optimizer: {type: adam}
train: {batch_size: 16, epochs: 2, abort_seconds: 1}
sharding: {types: [row_wise]}
checkpoint: {every_steps: 2, keep: 2}
"""
KILLS = 20
SAVES = (3, 4)
# By how often the ranks have agreed in a save: that there is none of this step, on a folder, that
# all have written, and on what rank 0 finished.
STAGES = ("before", "before", "writing", "written", "finishing")
PUBLISHED = "published"
STEP = re.compile(r"step-\d+")
FILE_EVENTS = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0}


@dataclass
class Moments:
    """The moments of a rank's saves, and the one at which it is killed.

    Attributes:
        report: Where to write what came to pass.
        kill_at: Number of a save, from 1, and of a moment in it, from 0; None to write all down.
    """

    report: Path
    kill_at: tuple[int, int] | None = None
    save: int = 0
    active: bool = False
    agreements: int = 0
    renamed: bool = False
    seen: list[list[Any]] = field(default_factory=list)

    def reach(self, what: str) -> None:
        if not self.active:
            return
        if self.kill_at == (self.save, len(self.seen)):
            self.active = False
            self.report.write_text(json.dumps([self.stage, what]))
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append([self.stage, what])

    @property
    def stage(self) -> str:
        if self.renamed:
            return PUBLISHED
        return STAGES[self.agreements]

    def watch(self) -> None:
        """Makes this process reach its moments."""
        _wrap(Checkpoints, "save", self._save)
        _wrap(Ranks, "agree", self._agree)
        _wrap(os, "fsync", lambda original, *a: (self.reach("fsync"), original(*a)))
        _wrap(torch, "save", lambda original, *a: (self.reach("write"), original(*a)))
        sys.addaudithook(self._audit)

    def _save(self, original: Callable[..., Any], *arguments: Any) -> None:
        self.save, self.active = self.save + 1, True
        self.agreements, self.renamed, self.seen = 0, False, []
        self.reach("save")
        original(*arguments)
        self.renamed = True
        self.reach("return")
        self.active = False
        if self.kill_at is None and self.save in SAVES:
            self.report.write_text(json.dumps(self.seen))

    def _agree(self, original: Callable[..., Any], *arguments: Any) -> Any:
        self.reach("agree")
        if self.active:
            self.agreements += 1
        return original(*arguments)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in FILE_EVENTS:
            return
        path = str(arguments[FILE_EVENTS[event]])
        name = os.path.basename(path)
        if "step-" in path or event in ("os.remove", "os.rmdir"):  # removal has names alone
            self.reach(f"{event} {STEP.sub('step', name)}")
            self.renamed |= event == "os.rename" and name.startswith("step-")


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: around(lambda *b: original(*b, **k), *a))


def _draw(moments: dict[int, list[list[str]]]) -> list[tuple[int, int, int]]:
    """Draws (rank, save, moment), from each stage of each rank in turn."""
    generator = random.Random(0)
    stages: dict[tuple[int, str], list[int]] = {}
    for rank, own in moments.items():
        for number, (stage, what) in enumerate(own):
            # The moment between the ends of the ranks is one among many, but must be there.
            between = stage == "writing" and what == "agree"
            stages.setdefault((rank, "between" if between else stage), []).append(number)
    kinds = {(0, "finishing"), *((r, s) for r in (0, 1) for s in (*STAGES[1:4], "between"))}
    assert stages.keys() == kinds | {(0, PUBLISHED), (1, PUBLISHED)}
    return [
        (rank, generator.choice(SAVES), generator.choice(numbers))
        for (rank, _), numbers in itertools.islice(itertools.cycle(stages.items()), KILLS)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, Outcome]:
    """The configuration, the moments of each rank's saves, and what the run left."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = folder / "config.yaml"
    config.write_text(CONFIG)

    def before(rank: int) -> None:
        Moments(folder / f"moments.{rank}").watch()

    codes = run_command(2, [str(config), "--output", str(folder / "run")], folder / "log", before)
    assert codes == [0, 0], (folder / "log.0").read_text()
    moments = {rank: json.loads((folder / f"moments.{rank}").read_text()) for rank in (0, 1)}
    return config, moments, read_outcome(folder / "run")


def test_a_killed_rank_costs_no_bit(uninterrupted, tmp_path: Path) -> None:
    config, moments, expected = uninterrupted
    for number, (rank, save, moment) in enumerate(_draw(moments)):
        run = tmp_path / str(number)
        case = f"rank {rank}, save {save}, moment {moment}: {moments[rank][moment]}"

        def before(own: int, rank=rank, kill_at=(save, moment), run=run) -> None:
            if own == rank:
                Moments(run.with_suffix(".moment"), kill_at).watch()

        arguments = [str(config), "--output", str(run)]
        codes = run_command(2, arguments, run.with_suffix(".log"), before)
        assert codes[rank] == -signal.SIGKILL, case
        assert json.loads(run.with_suffix(".moment").read_text()) == moments[rank][moment]
        assert codes[1 - rank] == EXIT_LOST_RANK, case
        text = run.with_suffix(f".log.{1 - rank}").read_text()
        assert "ERROR another rank ended or does not answer, so this one ends" in text, case
        complete = [path.name for path in checkpoint_folder.complete(run / "checkpoints")]
        newest, (stage, _) = complete[-1], moments[rank][moment]
        steps = [int(name.removeprefix("step-")) for name in complete]
        before_save, after_save = [2 * save - 4, 2 * save - 2], [2 * save - 2, 2 * save]
        if stage == PUBLISHED:
            assert steps[-2:] == after_save, case
        elif (rank, stage) != (1, "written"):  # rank 0 may be quicker or slower
            assert steps == before_save, case

        codes = run_command(2, [*arguments, "--resume"], run.with_suffix(".resumed"))
        text = run.with_suffix(".resumed.0").read_text()
        assert codes == [0, 0], case + text
        assert f"resumed {run / 'checkpoints' / newest} after" in text, case
        assert_same_bits(read_outcome(run), expected)
        # What the killed process left is gone, and so are the checkpoints beyond two.
        assert steps_of(run) == [8, 10], case


def test_everything_is_on_disk_before_the_rename(uninterrupted) -> None:
    """A kill cannot show it, because the system still writes what a dead process had written."""
    _, moments, _ = uninterrupted
    whats = {rank: [what for _, what in own] for rank, own in moments.items()}
    for rank, own in whats.items():
        opened = own.index(f"open __{rank}_0.distcp")
        assert own[opened:].index("fsync") < own[opened:].index("agree")
    first = whats[0]
    rename = first.index("os.rename step")
    for name in ("training.json", "manifest.json", "step.partial"):
        opened = max(n for n, what in enumerate(first[:rename]) if what == f"open {name}")
        assert first[opened + 1] == "fsync", name
    # And the rename itself before the older checkpoint goes.
    assert first[rename + 1] == "fsync"
    assert rename + 1 < first.index("os.rename step.removed")


def test_a_rank_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    log = tmp_path / "log"

    def before(rank: int) -> None:
        def silent(original: Callable[..., Any], *arguments: Any) -> Any:
            while "ERROR" not in log.with_name("log.0").read_text():
                time.sleep(0.05)
            return original(*arguments)

        if rank == 1:
            _wrap(Checkpoints, "save", silent)

    arguments = [str(config), "--output", str(tmp_path / "run"), "--timeout", "2"]
    assert run_command(2, arguments, log, before) == [EXIT_LOST_RANK] * 2
    assert "Timed out waiting 2000ms" in log.with_name("log.0").read_text()
    assert "Traceback" not in log.with_name("log.0").read_text()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_is_a_positive_number(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(["any.yaml", f"--timeout={seconds}"])
    assert raised.value.code == 2
    assert f"argument --timeout: {seconds!r} is not a number of seconds" in capsys.readouterr().err
