"""Which checkpoint a run goes on from, and which configurations may go on from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from torchrec_ext.command.errors import UserError
from torchrec_ext.train import checkpoint_folder
from torchrec_ext.train.checkpoint import TRAINING, Progress
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import load
from torchrec_ext.train.history import Evaluation, History
from torchrec_ext.train.metrics import Quality
from torchrec_ext.train.resume import ResumePoint, check_resumable, find_resume_point
from torchrec_ext.train.tables import ZeroCount

CONTENT: dict[str, Any] = {
    "name": "run",
    "data": {"dataset": "synthetic", "examples": 100, "features": 2, "rows": 30},
    "model": {"type": "wide_deep", "hidden": [8]},
    "optimizer": {"type": "ftrl", "l1_reg": 0.01},
    "deep_optimizer": {"type": "adam"},
    "train": {"epochs": 2},
}
CONFIG = Config.model_validate(CONTENT)
DATA = "00c0ffee"


def _progress(step: int = 7) -> Progress:
    return Progress(step, 2, DATA, CONFIG.model_dump(mode="json"), History().to_json())


def _save(run: Path, step: int) -> Path:
    partial = checkpoint_folder.begin(run / "checkpoints", step)
    (partial / TRAINING).write_text(json.dumps(asdict(_progress(step))))
    return checkpoint_folder.publish(partial, [TRAINING])


def test_a_run_goes_on_in_its_folder_from_the_newest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    _save(run, 2)
    newest = _save(run, 10)
    checkpoint_folder.begin(run / "checkpoints", 11)
    expected = ResumePoint(newest, run, _progress(10))
    for resume, output in (("", "run"), ("run", None), ("run", str(tmp_path / "run"))):
        assert find_resume_point(resume, output) == expected


def test_another_folder_starts_a_run_of_its_own(tmp_path: Path) -> None:
    first, second = _save(tmp_path / "run", 1), _save(tmp_path / "run", 2)
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    assert find_resume_point(run, other) == ResumePoint(second, None, _progress(2))
    for output in (None, run, other):
        point = find_resume_point(str(first), output)
        assert point == ResumePoint(first, None, _progress(1))


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    def error(resume: str, output: str | None = None) -> str:
        with pytest.raises(UserError) as raised:
            find_resume_point(resume, output)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "--resume needs a folder" in error("")
    run = tmp_path / "run"
    assert f"there is no complete checkpoint in {run / 'checkpoints'}" in error(str(run))
    step = _save(run, 1)
    (step / TRAINING).write_text("")
    assert f"there is no complete checkpoint in {run / 'checkpoints'}" in error("", str(run))
    assert f"--resume {step}: not a complete checkpoint: {step / TRAINING} has 0" in error(
        str(step)
    )
    checkpoint_folder.publish(checkpoint_folder.begin(run / "checkpoints", 2), [])
    assert "training.json: No such file" in error(str(run))


OTHER_HISTORY = json.dumps({**asdict(_progress()), "history": {}})


@pytest.mark.parametrize("text", ["[]", "{}", "{", "null", OTHER_HISTORY])
def test_an_unreadable_progress_is_said(text: str, tmp_path: Path) -> None:
    partial = checkpoint_folder.begin(tmp_path / "checkpoints", 2)
    (partial / TRAINING).write_text(text)
    checkpoint_folder.publish(partial, [TRAINING])
    with pytest.raises(UserError, match="training.json is damaged or of another version"):
        find_resume_point(str(tmp_path), None)


def _changed(**changed: Any) -> Config:
    return Config.model_validate({**CONTENT, **changed})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"seed": 1}, "seed is 0 in the checkpoint and 1 now"),
        ({"train": {"batch_size": 8}}, "train.batch_size is 512 in the checkpoint and 8 now"),
        ({"train": {"shuffle": False}}, "train.shuffle is True in the checkpoint and False now"),
        ({"optimizer": {"type": "ftrl"}}, "optimizer.l1_reg is 0.01 in the checkpoint and 0.0 now"),
        (
            {"optimizer": {"type": "exact_adagrad"}},
            "optimizer.l1_reg is 0.01 in the checkpoint and not set now",
        ),
        (
            {"deep_optimizer": {"type": "adam", "beta1": 0.5}},
            "deep_optimizer.beta1 is 0.9 in the checkpoint and 0.5 now",
        ),
        (
            {"dense_optimizer": {"learning_rate": 0.5}},
            "dense_optimizer.learning_rate is 0.001 in the checkpoint and 0.5 now",
        ),
        (
            {"model": {"type": "wide_deep", "hidden": [8, 8]}},
            "model.hidden is [8] in the checkpoint and [8, 8] now",
        ),
        (
            {"data": {"dataset": "criteo-tsv", "path": "x"}},
            "data.dataset is 'synthetic' in the checkpoint and 'criteo-tsv' now",
        ),
        (
            {"data": {**CONTENT["data"], "evaluate_on": "validation"}},
            "data.evaluate_on is 'test' in the checkpoint and 'validation' now",
        ),
    ],
)
def test_a_key_that_changes_training_is_named(changed: dict[str, Any], expected: str) -> None:
    point = ResumePoint(Path("step"), None, _progress())
    with pytest.raises(UserError) as raised:
        check_resumable(point, _changed(**changed), DATA, steps=10)
    assert expected in str(raised.value)
    assert str(raised.value).startswith("cannot resume step: ")


def test_what_changes_nothing_may_change() -> None:
    now = _changed(
        name="other",
        train={"epochs": 5, "max_steps": 9},
        sharding={"types": ["row_wise"], "tables": {"wide_f0": "table_wise"}},
        checkpoint={"every_steps": 3},
    )
    check_resumable(ResumePoint(Path("step"), None, _progress(9)), now, DATA, steps=9)


def test_other_data_and_an_end_that_has_passed_are_refused() -> None:
    point = ResumePoint(Path("step"), None, _progress(9))
    with pytest.raises(UserError, match="data: other examples"):
        check_resumable(point, CONFIG, "00000000", steps=10)
    with pytest.raises(UserError, match="done 9 steps, and train.epochs and train.max_steps end a"):
        check_resumable(point, CONFIG, DATA, steps=8)


def test_a_fingerprint_tells_examples_apart() -> None:
    def fingerprint(**changed: Any) -> str:
        data = {**CONTENT["data"], **changed}
        return load(_changed(data=data).data).fingerprint()

    assert fingerprint() == fingerprint()
    others = ({"seed": 1}, {"rows": 31}, {"test_fraction": 0.3}, {"examples": 99})
    assert len({fingerprint(), *(fingerprint(**other) for other in others)}) == 5


def test_a_history_survives_a_file_bit_by_bit() -> None:
    zeros = {"wide_a": ZeroCount(1, 2, 3, 4)}
    evaluations = [
        Evaluation(2, Quality(None, 0.1 + 0.2, 1 / 3, 20), zeros),
        Evaluation(4, Quality(0.7, 0.5, 0.4, 20), zeros),
    ]
    history = History([1 / 3, 1e-17], evaluations, 1.25, zeros)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
