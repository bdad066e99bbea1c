"""Zeros over the steps, and the command that reads them from a checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.distributed.ranks import run_on_ranks
from torchrec_ext.command.ranks import Ranks, StopRequest
from torchrec_ext.train import command, loop, sparsity
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import load
from torchrec_ext.train.distribute import distribute
from torchrec_ext.train.history import CountedZeros, Evaluation, History
from torchrec_ext.train.metrics import Quality
from torchrec_ext.train.model import build_model
from torchrec_ext.train.report import summarise
from torchrec_ext.train.saved_run import open_run
from torchrec_ext.train.sparsity_picture import norms_of_rows
from torchrec_ext.train.tables import ZeroCount

from .processes import run_command

CONTENT: dict[str, Any] = {
    "name": "zeros",
    "data": {"dataset": "synthetic", "examples": 500, "features": 2, "rows": 40},
    "model": {"type": "wide_deep", "wide_dim": 1, "deep_dim": 6, "hidden": [4]},
    "optimizer": {"type": "ftrl", "learning_rate": 0.3, "ftrl_beta": 0.01, "l1_reg": 0.02},
    "deep_optimizer": {"type": "exact_adagrad"},
    "train": {"batch_size": 50, "epochs": 2},  # 8 steps each
    "sharding": {"types": ["row_wise"]},
    "checkpoint": {"every_steps": 5},
}


def _config(folder: Path, **train: Any) -> str:
    content = {**CONTENT, "train": {**CONTENT["train"], **train}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return str(path)


def _zeros(number: int) -> dict[str, ZeroCount]:
    return {"wide_a": ZeroCount(number, 8, number + 1, 10), "deep_a": ZeroCount(0, 16, 0, 20)}


HISTORY = History(
    losses=[0.5] * 4,
    counted=[CountedZeros(2, _zeros(2)), CountedZeros(4, _zeros(4))],
    evaluations=[Evaluation(4, Quality(0.5, 0.5, 0.5, 2), _zeros(4))],
    zeros=_zeros(4),
)


def test_metrics_have_the_shares_by_step() -> None:
    shares = summarise(Config.model_validate(CONTENT), HISTORY)["zero_shares"]
    assert [each["step"] for each in shares] == [2, 4]
    assert shares[0]["tables"] == {
        "wide_a": {"touched_share": 0.25, "share": 0.3},
        "deep_a": {"touched_share": 0.0, "share": 0.0},
        "all_wide": {"touched_share": 0.25, "share": 0.3},
        "all_deep": {"touched_share": 0.0, "share": 0.0},
    }
    assert shares[1]["tables"]["wide_a"] == {"touched_share": 0.5, "share": 0.5}


def test_counts_travel_through_a_file() -> None:
    content = json.loads(json.dumps(HISTORY.to_json()))
    assert History.from_json(content) == HISTORY
    del content["counted"]
    assert History.from_json(content).counted == []


def _count(every: int | None) -> tuple[History, int, list[str]]:
    """Train; give the history, how often tables were counted, and what the bar showed."""
    content = {**CONTENT, "train": {**CONTENT["train"], "zeros_every_steps": every}}
    config = Config.model_validate(content)
    size = torch.distributed.get_world_size()
    ranks = Ranks(torch.distributed.get_rank(), size, size)
    split = load(config.data)
    distributed = distribute(build_model(config.model, split.train), config, ranks)
    passes, shown = [], []
    count, postfix = loop.count_zeros, loop.tqdm.set_postfix
    loop.count_zeros = lambda *arguments: passes.append(1) or count(*arguments)
    loop.tqdm.set_postfix = lambda self, **values: (
        shown.append(values.get("zeros")) or postfix(self, **values)
    )
    history = loop.Trainer(config, split, distributed, ranks, StopRequest()).run()
    return history, len(passes), shown


def test_zeros_are_counted_in_evaluations_alone_without_the_key() -> None:
    history, passes, shown = run_on_ranks(2, _count, None)[0]
    assert [each.step for each in history.zeros_over_steps()] == [8, 16]
    assert history.counted == []
    assert passes == 3  # two evaluations and the end, for 16 steps
    assert shown[:8] == [None] * 8
    share = history.evaluations[0].zeros
    wide = share["wide_f0"] + share["wide_f1"]
    assert shown[8:] == [f"{wide.touched_share:.1%}"] * 8


def test_zeros_are_counted_after_every_so_many_steps() -> None:
    (history, passes, shown), (other, *_) = run_on_ranks(2, _count, 3)
    assert [each.step for each in history.counted] == [3, 6, 9, 12, 15]
    assert [each.step for each in history.zeros_over_steps()] == [3, 6, 8, 9, 12, 15, 16]
    assert passes == 8
    assert other.counted == history.counted
    shares = [
        (each.zeros["wide_f0"] + each.zeros["wide_f1"]).touched_share
        for each in history.zeros_over_steps()
    ]
    assert len(set(shares)) > 3 and 0 < shares[-1] < 1
    assert shown[3] == f"{shares[0]:.1%}" and shown[8] == f"{shares[2]:.1%}"
    assert shown[9] == f"{shares[3]:.1%}"  # the newer one, not the evaluation's


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks, with checkpoints after steps 5, 10, 15 and 16."""
    folder = tmp_path_factory.mktemp("run")
    arguments = [_config(folder, zeros_every_steps=3), "--output", str(folder / "run")]
    assert run_command(2, arguments, folder / "log") == [0, 0]
    return folder / "run"


@pytest.mark.parametrize(("step", "counted"), [(10, [9, 12, 14, 16]), (15, [9, 12, 15, 16])])
def test_a_resumed_run_has_the_counts_of_one_that_was_not_stopped(
    run: Path, tmp_path: Path, step: int, counted: list[int]
) -> None:
    point = str(run / "checkpoints" / f"step-{step:010d}")
    # The key may change: from here on counts come every 2 steps.
    changed = _config(tmp_path, zeros_every_steps=2)
    arguments = [changed, "--resume", point, "--output", str(tmp_path / "again")]
    assert run_command(2, arguments, tmp_path / "log") == [0, 0]
    whole, again = (
        {each["step"]: each["tables"] for each in json.loads(path.read_text())["zero_shares"]}
        for path in (run / "metrics.json", tmp_path / "again" / "metrics.json")
    )
    assert list(whole) == [3, 6, 8, 9, 12, 15, 16]
    assert list(again) == [3, 6, 8, *counted]
    assert all(again[each] == whole[each] for each in again if each in whole)


def test_the_command_reads_the_newest_checkpoint_of_two_ranks(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sparsity.main([str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-2:] == ["step", "16"]
    assert [line[0] for line in lines[2:]] == [
        *("deep_f0", "deep_f1", "wide_f0", "wide_f1", "all", "Written")
    ]
    zeros = json.loads((run / "metrics.json").read_text())["zeros"]
    for line in lines[2:6]:
        expected = zeros[line[0]]
        assert line[1:4] == ["40", "6" if line[0].startswith("deep") else "1", "float32"]
        assert int(line[6]) == expected["total"] - expected["zeros"]
    wide = lines[4]
    assert 0 < int(wide[4]) < 40
    assert wide[5] == f"{1 - int(wide[4]) / 40:.1%}"
    assert wide[8:] == ["160", str(int(wide[4]) * 8)]
    pixels = np.asarray(Image.open(run / "sparsity.png").convert("L"))
    assert pixels.std() > 10


def test_the_command_reads_a_single_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    picture = tmp_path / "picture.png"
    step = run / "checkpoints" / "step-0000000010"
    assert sparsity.main([str(step), "--picture", str(picture)]) == 0
    assert capsys.readouterr().out.startswith(f"{step}, step 10\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(run.rglob("*")) == before


def test_a_single_checkpoint_may_be_the_current_folder_or_a_link(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = run / "checkpoints" / "step-0000000010"
    (tmp_path / "best").symlink_to(step)
    assert open_run(tmp_path / "best").progress.step == 10
    monkeypatch.chdir(step)
    assert open_run(Path()).progress.step == 10


def test_the_picture_goes_on_to_the_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of the history and that of the tables in the checkpoint itself."""
    drawn: list[History] = []
    monkeypatch.setattr(
        sparsity, "draw_sparsity", lambda path, title, history, norms: drawn.append(history)
    )
    assert sparsity.main([str(run)]) == 0
    counts = drawn[0].zeros_over_steps()
    assert [each.step for each in counts] == [3, 6, 8, 9, 12, 15, 16]
    shares = json.loads((run / "metrics.json").read_text())["zero_shares"][-1]
    for table, count in counts[-1].zeros.items():
        assert count.touched_share == shares["tables"][table]["touched_share"]


def test_norms_of_rows_by_hand() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0], [torch.nan, 1.0], [0.6, 0.8]])
    norms = norms_of_rows(weight)
    assert norms.zero_share == pytest.approx(0.2)
    assert norms.counts.sum() == 3
    assert norms.edges[0] == pytest.approx(-30) and norms.edges[-1] == pytest.approx(np.log10(5))
    assert norms_of_rows(torch.zeros(3, 1)).counts.sum() == 0


def test_norms_that_differ_by_rounding_alone_share_a_bin() -> None:
    norms = torch.tensor([1.0, 1.0 + 2**-49], dtype=torch.float64)
    found = norms_of_rows((10.0 * norms).view(2, 1))
    assert found.counts.max() == found.counts.sum() == 2
    assert found.edges[0] < 1.0 < found.edges[-1]


def test_tables_are_those_of_the_checkpoint(run: Path) -> None:
    saved = open_run(run)
    wide = [table for table in saved.tables if table.collection == "linear.wide"]
    assert [(table.name, table.feature) for table in wide] == [("wide_f0", "f0"), ("wide_f1", "f1")]
    assert [saved.optimizer_of(table) for table in saved.tables] == (
        ["exact_adagrad"] * 2 + ["ftrl"] * 2
    )
    assert saved.read_table(wide[0]).shape == (40, 1)
    assert set(saved.parameters) == {
        *("linear.bias", "over_arch.0.weight", "over_arch.0.bias"),
        *("over_arch.2.weight", "over_arch.2.bias"),
    }


def test_tables_are_in_the_order_of_the_datas_features(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-0000000016"
    shutil.copytree(run / "checkpoints" / folder.name, folder)
    training = folder / "training.json"
    content = json.loads(training.read_text())
    for features, expected in ((["f1", "f0"], ["f1", "f0"]), ([], ["f0", "f1"])):
        content["features"] = features
        training.write_text(json.dumps(content))
        manifest = folder / "manifest.json"
        sizes = json.loads(manifest.read_text())
        sizes["files"]["training.json"] = training.stat().st_size
        manifest.write_text(json.dumps(sizes))
        assert [table.feature for table in open_run(folder).tables] == expected * 2


def test_what_is_no_checkpoint_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sparsity.main([str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert f"ERROR cannot read {tmp_path}: there is no complete checkpoint in {tmp_path}" in text
    assert "; checkpoint.every_steps makes runs save some" in text
    assert sparsity.main([str(run), "--picture", str(tmp_path / "no" / "p.png")]) == 2
    assert f"ERROR cannot write {tmp_path / 'no' / 'p.png'}" in capsys.readouterr().err
    short = tmp_path / "step-0000000001"
    short.mkdir()
    for path in (run / "checkpoints" / "step-0000000016").iterdir():
        (short / path.name).write_bytes(path.read_bytes())
    (data,) = short.glob("__0_0.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    assert sparsity.main([str(short)]) == 2
    assert "not a complete checkpoint: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", [b"\x80\x04\x8c\x01\xff.", b"\x80\x04NN\x93.", b"cnothing\nhere\n."]
)
def test_a_damaged_list_of_tensors_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    """Pickles that raise UnicodeDecodeError, TypeError or UnpicklingError, ModuleNotFoundError."""
    folder = tmp_path / "step-0000000016"
    shutil.copytree(run / "checkpoints" / folder.name, folder)
    path = folder / ".metadata"
    path.write_bytes(damage.ljust(path.stat().st_size, b"\0"))
    assert sparsity.main([str(folder)]) == 2
    text = capsys.readouterr().err
    assert f"ERROR cannot read {folder}: its .metadata is damaged: " in text
    assert text.count("\n") == 1


def test_the_train_command_has_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([_config(tmp_path, zeros_every_steps=0)]) == 2
    assert "train.zeros_every_steps: input should be greater" in capsys.readouterr().err
