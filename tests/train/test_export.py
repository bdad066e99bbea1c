"""The exported model has the rows that are not zero, and gives the whole model's outputs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext import sparse_model
from torchrec_ext.command.config_file import load_config
from torchrec_ext.command.errors import UserError
from torchrec_ext.sparse_model import SparseModelError
from torchrec_ext.sparse_model.files import write_tensors
from torchrec_ext.train import export, exported
from torchrec_ext.train.config import Config
from torchrec_ext.train.data import load
from torchrec_ext.train.exported import load_model
from torchrec_ext.train.saved_run import open_run

from .outcomes import read_tensors
from .processes import run_command

FTRL = {"type": "ftrl", "learning_rate": 0.3, "ftrl_beta": 0.01, "l1_reg": 0.02}
DEEP = {"type": "exact_adagrad"}
# Ranks, and what differs from the other runs.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "row_wise_on_two_ranks": (
        2,
        {
            "model": {"type": "wide_deep", "wide_dim": 1, "deep_dim": 6, "hidden": [4]},
            "deep_optimizer": DEEP,
            "sharding": {"types": ["row_wise"]},
        },
    ),
    "factors_column_wise_on_two_ranks": (
        2,
        {
            "model": {"type": "factorization_machine", "factor_dim": 8},
            "deep_optimizer": {"type": "ftrl", "learning_rate": 0.1, "l1_reg": 0.001},
            "sharding": {"tables": {"factor_f0": "column_wise"}},
        },
    ),
    "all_zero": (1, {"model": {"type": "linear"}, "optimizer": {**FTRL, "l1_reg": 10.0}}),
}


def _train(folder: Path, ranks: int, changed: dict[str, Any]) -> Path:
    content = {
        "name": "export",
        "data": {"dataset": "synthetic", "examples": 520, "features": 3, "rows": 40},
        "optimizer": FTRL,
        "train": {"batch_size": 50},
        "checkpoint": {"every_steps": 8},
        **changed,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    assert run_command(ranks, [str(path), "--output", str(folder / "run")], folder / "log") == (
        [0] * ranks
    )
    return folder / "run"


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp(request.param), *RUNS[request.param])


@pytest.fixture(scope="module")
def row_wise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("run"), *RUNS["row_wise_on_two_ranks"])


def test_the_files_hold_the_checkpoints_rows_and_nothing_else(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export.main([str(run), str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # read_tensors writes a file beside the folder of the checkpoints.
    saved = read_tensors(sorted((run / "checkpoints").iterdir())[-1])
    expected = {
        key.split("/")[-1]: value for key, value in saved.items() if key.startswith("model/")
    }
    seen = set()
    for path in out.glob("*.safetensors"):
        if path.name == "dense.safetensors":
            for name, value in load_file(path).items():
                assert torch.equal(value, expected[name])
                seen.add(name)
            continue
        for table in sparse_model.read(path).tables:
            name = f"{path.name.removesuffix('.safetensors')}.embedding_bags.{table.name}.weight"
            dense = torch.zeros(table.rows, table.dim)
            dense[table.row_ids] = table.weight
            assert torch.equal(dense, expected[name])
            assert len(table.row_ids) == int((dense != 0).any(dim=1).sum())
            assert table.feature_names == (table.name.partition("_")[2],)
            wide = load_config(Config, str(out / "config.yaml")).optimizer.type
            assert table.optimizer == wide or not table.name.startswith("wide_")
            seen.add(name)
    assert seen == expected.keys()


def test_the_outputs_are_the_whole_models(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export.main([str(run), str(out)]) == 0
    printed = capsys.readouterr().out
    metrics = json.loads((run / "metrics.json").read_text())
    found = re.search(
        r"^test, 104 examples: AUC (\S+) whole, (\S+) without zero rows; largest difference 0 of "
        r"pooled embeddings, 0 of logits$",
        printed,
        re.MULTILINE,
    )
    assert found is not None, printed
    assert found[1] == found[2]
    # The whole model is the one that the run evaluated, up to the order of sums over shards.
    assert float(found[1]) == pytest.approx(metrics["evaluation"]["auc"], abs=2e-3)
    sizes = re.search(r"^(\d+) bytes before .*, (\d+) bytes after", printed, re.MULTILINE)
    assert sizes is not None
    assert int(sizes[1]) == 4 * sum(
        value.numel()
        for key, value in read_tensors(sorted((run / "checkpoints").iterdir())[-1]).items()
        if key.startswith("model/")
    )
    assert int(sizes[2]) == sum(path.stat().st_size for path in out.glob("*.safetensors"))


def test_a_single_checkpoint_and_no_check(
    row_wise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(export, "load")
    step = sorted((row_wise / "checkpoints").iterdir())[-1]
    assert export.main([str(step), str(tmp_path / "deep" / "out"), "--no-check"]) == 0
    assert "AUC" not in capsys.readouterr().out
    sparse = sparse_model.load(tmp_path / "deep" / "out" / "linear.wide.safetensors")
    weight = read_tensors(step)["model/linear.wide.embedding_bags.wide_f1.weight"]
    lookups = KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.arange(40).repeat(3), lengths=torch.ones(120, dtype=torch.int64)
    )
    assert torch.equal(sparse(lookups)["f1"], weight)
    assert 0 < int((weight == 0).sum()) < 40


def test_the_exported_model_is_quantised_as_a_whole(row_wise: Path, tmp_path: Path) -> None:
    assert export.main([str(row_wise), str(tmp_path / "out"), "--no-check"]) == 0
    config = load_config(Config, str(tmp_path / "out" / "config.yaml"))
    split = load(config.data)
    model = load_model(tmp_path / "out", config.model, split.train)
    half = sparse_model.quantize(model, torch.float16)
    batch = split.held_out.batch(torch.arange(50), 50)
    with torch.no_grad():
        exact, rounded = model(batch.sparse, batch.dense), half(batch.sparse, batch.dense)
    assert 0 < float((exact - rounded).abs().max()) < 1e-2


def test_a_model_that_differs_is_not_written(
    row_wise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(weight: torch.Tensor, *arguments: Any) -> Any:
        return sparse_model.prune_table(weight.where(weight != weight.max(), 0.0), *arguments)

    monkeypatch.setattr(export, "prune_table", wrong)
    assert export.main([str(row_wise), str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "ERROR the outputs without zero rows differ: nothing was written" in printed.err
    assert not re.search("difference 0 of pooled", printed.out)
    assert list(tmp_path.iterdir()) == []


def test_without_the_data_it_says_that_nothing_was_compared(
    row_wise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(_: object) -> Any:
        raise UserError("data.path: no such file")

    other = load(open_run(row_wise).config.data.model_copy(update={"seed": 1}))
    for number, found in enumerate((missing, lambda _: other)):
        monkeypatch.setattr(export, "load", found)
        assert export.main([str(row_wise), str(tmp_path / str(number))]) == 0
        assert (tmp_path / str(number) / "linear.wide.safetensors").is_file()
        text = ("data.path: no such file", "data: other examples than the run's")[number]
        assert f"WARNING outputs were not compared: {text}" in capsys.readouterr().err


def test_mistakes_are_one_line(
    row_wise: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: Path) -> str:
        assert export.main([str(each) for each in arguments]) == 2
        text = capsys.readouterr().err
        assert text.startswith("ERROR ") and text.count("\n") == 1
        return text

    (tmp_path / "there").mkdir()
    assert f"{tmp_path / 'there'} exists" in error(row_wise, tmp_path / "there")
    assert f"cannot read {tmp_path}: there is no complete" in error(tmp_path, tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert f"{tmp_path / 'link'} exists" in error(row_wise, tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "out.partial").mkdir()
    assert "out.partial exists, left by an interrupted export" in error(row_wise, tmp_path / "out")
    (tmp_path / "file").touch()
    assert "cannot write" in error(row_wise, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out.partial", "there"]


def test_parameters_of_another_model_are_refused(row_wise: Path, tmp_path: Path) -> None:
    assert export.main([str(row_wise), str(tmp_path / "out"), "--no-check"]) == 0
    config = load_config(Config, str(tmp_path / "out" / "config.yaml"))
    examples = load(config.data).train
    dense = tmp_path / "out" / exported.DENSE
    parameters = load_file(dense)
    bias = parameters.pop("linear.bias")
    dense.unlink()
    write_tensors(parameters, dense, {})
    with pytest.raises(SparseModelError, match=r"it lacks \['linear.bias'\] and has \[\]"):
        load_model(tmp_path / "out", config.model, examples)
    write_tensors({**parameters, "linear.bias": bias, "more": torch.zeros(1)}, dense, {})
    with pytest.raises(SparseModelError, match=r"it lacks \[\] and has \['more'\]"):
        load_model(tmp_path / "out", config.model, examples)
    write_tensors({**parameters, "linear.bias": torch.zeros(2)}, dense, {})
    with pytest.raises(SparseModelError, match=r"holds another model: .*mismatch for linear\.bias"):
        load_model(tmp_path / "out", config.model, examples)
    dense.write_bytes(dense.read_bytes()[:-1])
    with pytest.raises(SparseModelError, match=r"cannot read .*dense\.safetensors"):
        load_model(tmp_path / "out", config.model, examples)
    dense.unlink()
    with pytest.raises(SparseModelError, match=r"cannot read .*dense\.safetensors"):
        load_model(tmp_path / "out", config.model, examples)
    write_tensors({**parameters, "linear.bias": bias}, dense, {})
    (tmp_path / "out" / "deep.safetensors").unlink()
    with pytest.raises(SparseModelError, match=r"lacks .*deep\.embedding_bags\.deep_f0\.weight"):
        load_model(tmp_path / "out", config.model, examples)
