"""The README's Python examples run as they are printed."""

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

import torchrec_ext

from .distributed.ranks import run_on_ranks

README = Path(__file__).parents[1] / "README.md"


def _example(containing: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if containing in block]
    return block


def _model() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=10, embedding_dim=4, feature_names=[f"{name}_id"]
            )
            for name in ("user", "item")
        ],
        device=torch.device("meta"),
    )


def _train_one_step(*examples: str) -> dict[str, torch.Tensor]:
    """Runs examples on a model, trains it for a step and gives the states by name."""
    names: dict[str, Any] = {
        "model": _model(),
        "device": torch.device("cpu"),
        "DistributedModelParallel": DistributedModelParallel,
    }
    for example in examples:
        exec(example, names)
    features = KeyedJaggedTensor(
        keys=["user_id", "item_id"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1])
    )
    names["model"](features).wait().values().sum().backward()
    states = names["model"].fused_optimizer.state_dict()["state"]
    return {
        name: value.local_tensor()
        for table in states.values()
        for name, value in table.items()
        if isinstance(value, ShardedTensor)
    }


@pytest.fixture
def without_hook() -> Any:
    """Leaves TorchRec as it was."""
    yield
    torchrec_ext.uninstall()


def test_five_lines_train_with_ftrl(without_hook: None) -> None:
    (states,) = run_on_ranks(1, _train_one_step, _example("fused_params ="))
    assert sorted(states) == ["item.accum", "item.momentum1", "user.accum", "user.momentum1"]
    assert all(state.count_nonzero() == 4 for state in states.values())


def test_optimizers_per_table(without_hook: None) -> None:
    (states,) = run_on_ranks(
        1, _train_one_step, _example("_apply_optimizer_in_backward"), _example("fused_params =")
    )
    assert sorted(states) == ["item.momentum1", "user.accum", "user.momentum1"]
    assert all(state.count_nonzero() == 4 for state in states.values())


def _save_and_load(folder: str) -> tuple[int, list[str]]:
    """Runs the checkpoint's example on a trained model; nonzero elements and keys afterwards."""
    os.chdir(folder)
    checkpoint = _example("dcp.save")
    saved = _train_one_step(_example("fused_params ="), checkpoint)
    return sum(int(value.count_nonzero()) for value in saved.values()), os.listdir("checkpoints")


def test_a_checkpoint(without_hook: None, tmp_path: Path) -> None:
    (found,) = run_on_ranks(1, _save_and_load, str(tmp_path))
    assert found == (16, ["1000"])


def _plan(example: str) -> tuple[dict[str, Any], list[str]]:
    from torchrec_ext.distributed import EmbeddingBagCollectionSharder

    names: dict[str, Any] = {
        "torch": torch,
        "model": _model(),
        "sharders": [EmbeddingBagCollectionSharder({"optimizer": torchrec_ext.OptimType.FTRL})],
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, names)
    return names["plan"].plan, printed.getvalue().splitlines()


def test_the_planner_and_its_table(without_hook: None) -> None:
    (first, printed), (second, nothing) = run_on_ranks(2, _plan, _example("plan_table"))
    assert first.keys() == second.keys() != set()
    assert any("linear" in line and "accum" in line for line in printed)
    assert not any("linear" in line for line in nothing)


def test_module_without_sharding() -> None:
    names: dict[str, Any] = {}
    exec(_example("TableBatchedEmbeddingBags("), names)
    changed = names["bags"].split_optimizer_states()[0][0].count_nonzero(dim=1).nonzero()
    assert changed.flatten().tolist() == [3, 7]
