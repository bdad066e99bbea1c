"""A resumed run ends as the uninterrupted one: weights, states, metrics and all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.train.outcomes import assert_same_bits, read_outcome, read_tensors, steps_of
from tests.train.processes import run_command
from torchrec_ext.command.run import EXIT_USER_ERROR
from torchrec_ext.train import checkpoint_folder, loop
from torchrec_ext.train.checkpoint import Checkpoints
from torchrec_ext.train.loop import Trainer

# Five steps an epoch.
CONFIG: dict[str, Any] = {
    "name": "resumed",
    "data": {"dataset": "synthetic", "examples": 100, "features": 2, "rows": 30},
    "model": {"type": "wide_deep", "hidden": [8]},
    "optimizer": {"type": "ftrl", "learning_rate": 0.3, "ftrl_beta": 0.01, "l1_reg": 0.01},
    "deep_optimizer": {"type": "adam"},
    "dense_optimizer": {"learning_rate": 0.01, "weight_decay": 0.1},
    "train": {"batch_size": 16, "epochs": 2},
    "sharding": {"types": ["row_wise"]},
    "checkpoint": {"every_steps": 1, "keep": 100},
}
DENSE_ADAM = {"type": "adam", "sparse_mode": "dense", "weight_decay": 0.1}
MOMENTUM = {"type": "exact_sgd", "momentum": 0.9}
PER_ROW_ADAM = {"type": "adam", "bias_correction": "per_row"}
ROWWISE = {"type": "partial_rowwise_adam"}


def _config(folder: Path, name: str = "config", **changed: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changed}))
    return str(path)


def _run(ranks: int, run: Path, config: str, *arguments: str, before: Any = None) -> str:
    """Runs the command without mistakes; gives what rank 0 said."""
    log = run.with_name(run.name + ".log")
    keywords = {} if before is None else {"before": before}
    codes = run_command(ranks, [config, "--output", str(run), *arguments], log, **keywords)
    text = log.with_name(f"{log.name}.0").read_text()
    assert codes == [0] * ranks, text
    return text


def _error(ranks: int, folder: Path, config: str, *arguments: str) -> str:
    codes = run_command(ranks, [config, *arguments], folder / "error")
    texts = [(folder / f"error.{rank}").read_text() for rank in range(ranks)]
    assert codes == [EXIT_USER_ERROR] * ranks, texts
    assert sum(text.count("ERROR") for text in texts) == 1
    assert not any("Traceback" in text for text in texts)
    return next(line for line in texts[0].splitlines() if line.startswith("ERROR "))


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:010d}"


@pytest.mark.parametrize(
    ("ranks", "sharding", "wide", "deep", "shuffle"),
    [
        (2, "row_wise", CONFIG["optimizer"], DENSE_ADAM, True),
        (2, "column_wise", PER_ROW_ADAM, MOMENTUM, True),
        (2, "table_wise", {"type": "lamb"}, ROWWISE, False),
        (1, "table_wise", {"type": "fbgemm_exact_adagrad"}, {"type": "exact_adagrad"}, True),
    ],
    ids=["row_wise", "column_wise", "table_wise", "one_rank"],
)
def test_a_resumed_run_ends_with_the_same_bits(
    ranks, sharding, wide, deep, shuffle, tmp_path: Path
) -> None:
    config = _config(
        tmp_path,
        optimizer=wide,
        deep_optimizer=deep,
        sharding={"types": [sharding]},
        train={"batch_size": 16, "epochs": 2, "shuffle": shuffle},
    )
    _run(ranks, tmp_path / "whole", config)
    expected = read_outcome(tmp_path / "whole")
    assert steps_of(tmp_path / "whole") == list(range(1, 11))
    # Within an epoch, and at its end, where its evaluation is still to come.
    for step in (3, 5):
        run = tmp_path / f"from_{step}"
        text = _run(ranks, run, config, "--resume", str(_checkpoint(tmp_path / "whole", step)))
        assert f"after step {step}" in text
        assert_same_bits(read_outcome(run), expected)
        assert steps_of(run) == list(range(step + 1, 11))


def test_clock_moments_and_touched_rows_are_in_a_checkpoint(tmp_path: Path) -> None:
    _run(1, tmp_path / "run", _config(tmp_path, train={"batch_size": 16, "max_steps": 3}))
    tensors = read_tensors(_checkpoint(tmp_path / "run", 3))
    steps = {name: int(value) for name, value in tensors.items() if name.endswith("step")}
    assert len(steps) == 2 + 5  # of the deep tables, and of bias and over-arch
    assert set(steps.values()) == {3}
    assert sum(name.endswith("exp_avg_sq") for name in tensors) == 7
    touched = tensors["touched/f0"]
    assert touched.dtype == torch.bool and 0 < int(touched.sum()) < 30


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(first: int, second: int, tmp_path: Path) -> None:
    config = _config(tmp_path)
    _run(first, tmp_path / "whole", config)
    checkpoint = _checkpoint(tmp_path / "whole", 3)
    _run(second, tmp_path / "other", config, "--resume", str(checkpoint))
    expected, found = read_outcome(tmp_path / "whole"), read_outcome(tmp_path / "other")
    assert found.metrics["losses"][:3] == expected.metrics["losses"][:3]
    assert found.metrics["losses"] == pytest.approx(expected.metrics["losses"], abs=1e-6)
    assert found.metrics["zeros"] == expected.metrics["zeros"]
    for name, tensor in expected.tensors.items():
        if not name.startswith("random"):
            torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-6, atol=1e-6)


def test_every_rank_gets_its_random_state_back(tmp_path: Path) -> None:
    """With a loss that draws numbers, other ones on every rank."""

    def before(rank: int) -> None:
        original, start = loop.binary_cross_entropy_with_logits, Trainer.__init__

        def begin(*arguments: Any) -> None:
            start(*arguments)
            torch.manual_seed(1000 + rank)

        Trainer.__init__ = begin  # type: ignore[method-assign]
        loop.binary_cross_entropy_with_logits = lambda *a: original(*a) * (1 + torch.rand(()))

    config = _config(tmp_path)
    _run(2, tmp_path / "whole", config, before=before)
    expected = read_outcome(tmp_path / "whole")
    assert not expected.tensors["random_rank0"].equal(expected.tensors["random_rank1"])
    resume = ["--resume", str(_checkpoint(tmp_path / "whole", 3))]
    _run(2, tmp_path / "other", config, *resume, before=before)
    assert_same_bits(read_outcome(tmp_path / "other"), expected)


def test_an_interrupted_run_saves_and_goes_on_in_its_folder(tmp_path: Path) -> None:
    checkpoint = {"every_steps": 100}
    config, run = _config(tmp_path, checkpoint=checkpoint), tmp_path / "run"
    _run(1, tmp_path / "whole", config)
    assert steps_of(tmp_path / "whole") == [10]

    def before(rank: int) -> None:
        step = Trainer._step

        def interrupted(self: Trainer, batch: Any) -> float:
            if len(self.history.losses) == 6:
                os.kill(os.getpid(), signal.SIGINT)
            return step(self, batch)

        Trainer._step = interrupted  # type: ignore[method-assign]

    arguments = [config, "--output", str(run)]
    assert run_command(1, arguments, tmp_path / "log", before) == [128 + signal.SIGINT]
    assert steps_of(run) == [7]
    _run(1, run, config, "--resume")
    assert steps_of(run) == [7, 10]
    assert_same_bits(read_outcome(run), read_outcome(tmp_path / "whole"))
    assert json.loads((run / "metrics.json").read_text())["resumed_after_step"] == 7


def test_an_interrupted_evaluation_is_made_up_for(tmp_path: Path) -> None:
    config, run = _config(tmp_path), tmp_path / "run"
    _run(1, tmp_path / "whole", config)

    def before(rank: int) -> None:
        begin, evaluate = checkpoint_folder.begin, Trainer._evaluate

        def counted(parent: Path, step: int) -> Path:
            with (tmp_path / "saves").open("a") as file:
                file.write(f"{step} ")
            return begin(parent, step)

        def interrupted(self: Trainer) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            evaluate(self)

        checkpoint_folder.begin = counted
        Trainer._evaluate = interrupted  # type: ignore[method-assign]

    arguments = [config, "--output", str(run)]
    assert run_command(1, arguments, tmp_path / "log", before) == [128 + signal.SIGINT]
    # What is complete is not written again.
    assert (tmp_path / "saves").read_text() == "1 2 3 4 5 "
    _run(1, run, config, "--resume")
    assert_same_bits(read_outcome(run), read_outcome(tmp_path / "whole"))


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_ends_all_ranks_and_leaves_what_was(full: int, tmp_path: Path) -> None:
    config, run = _config(tmp_path), tmp_path / "run"

    def before(rank: int) -> None:
        save = Checkpoints.save

        def failing(self: Checkpoints, history: Any, touched: Any) -> None:
            if rank == full and len(history.losses) == 3:
                os.fsync = _no_space
            save(self, history, touched)

        Checkpoints.save = failing  # type: ignore[method-assign]

    codes = run_command(2, [config, "--output", str(run)], tmp_path / "log", before)
    assert codes == [EXIT_USER_ERROR] * 2
    text = (tmp_path / "log.0").read_text()
    assert f"checkpoints/step-0000000003.partial: rank {full}: [Errno 28] No space left" in text
    assert "Traceback" not in text
    complete = checkpoint_folder.complete(run / "checkpoints")
    assert complete == [_checkpoint(run, 1), _checkpoint(run, 2)]


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    def config(epochs: int) -> str:
        return _config(tmp_path, str(epochs), train={"batch_size": 16, "epochs": epochs})

    _run(1, tmp_path / "long", config(3))
    _run(1, tmp_path / "run", config(1))
    before = read_tensors(_checkpoint(tmp_path / "run", 5))
    # Nothing is left to do, and nothing changes.
    text = _run(1, tmp_path / "run", config(1), "--resume", str(tmp_path / "run"))
    assert "AUC 0." in text
    after = read_tensors(_checkpoint(tmp_path / "run", 5))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    _run(1, tmp_path / "run", config(3), "--resume", str(tmp_path / "run"))
    assert_same_bits(read_outcome(tmp_path / "run"), read_outcome(tmp_path / "long"))
    assert "epochs: 3" in (tmp_path / "run" / "config.yaml").read_text()


def test_without_the_section_nothing_is_saved(tmp_path: Path) -> None:
    config = _config(tmp_path, checkpoint=None)
    _run(1, tmp_path / "run", config)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", "metrics.json"}
    assert "checkpoint" not in (tmp_path / "run" / "config.yaml").read_text()
    error = _error(1, tmp_path, config, "--resume", str(tmp_path / "run"))
    assert f"there is no complete checkpoint in {tmp_path / 'run' / 'checkpoints'}" in error


def test_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path: Path) -> None:
    config, run = _config(tmp_path), tmp_path / "run"
    _run(1, run, config)
    expected = read_outcome(run)
    for step in (9, 10):
        file = _checkpoint(run, step) / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
    assert "after step 8" in _run(1, run, config, "--resume")
    assert_same_bits(read_outcome(run), expected)


def test_states_of_one_number_per_row_go_to_another_sharding(tmp_path: Path) -> None:
    deep = {"type": "exact_rowwise_adagrad"}
    config = _config(tmp_path, deep_optimizer=deep, sharding={"types": ["column_wise"]})
    _run(2, tmp_path / "run", config)
    shutil.rmtree(_checkpoint(tmp_path / "run", 10))
    rows = ["--set", "sharding.types=[row_wise]"]
    text = _run(2, tmp_path / "run", config, "--resume", str(tmp_path / "run"), *rows)
    assert "after step 9" in text
    assert "row_wise" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_configuration_that_trains_otherwise_is_refused_on_every_rank(tmp_path: Path) -> None:
    config, run = _config(tmp_path), tmp_path / "run"
    _run(2, run, config)
    metrics = (run / "metrics.json").read_text()
    changes = ["--set", "optimizer.l1_reg=0.5", "--set", "train.shuffle=false"]
    error = _error(2, tmp_path, config, "--resume", str(run), *changes)
    assert "optimizer.l1_reg is 0.01 in the checkpoint and 0.5 now" in error
    assert "train.shuffle is True in the checkpoint and False now" in error
    assert (run / "metrics.json").read_text() == metrics
