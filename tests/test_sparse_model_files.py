"""Files of sparse models: what they say, what is refused, and that they come from any plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torchrec import EmbeddingBagCollection, EmbeddingCollection, PoolingType

from torchrec_ext import OptimType, sparse_model
from torchrec_ext.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from torchrec_ext.sparse_model import SparseModelError

from .distributed.models import SEQUENCE_TABLES, Model, batches, plan_for, shard, write_weights
from .distributed.ranks import run_on_ranks
from .test_sparse_model import bags


def test_the_file_describes_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse_model.save(bags(PoolingType.MEAN), path, optimizers={"some": OptimType.FTRL})
    with safe_open(path, framework="pt") as stored:
        metadata = stored.metadata()
        assert stored.get_tensor("some.row_ids").dtype == torch.int32
        assert stored.get_tensor("some.weight").shape == (20, 6)
    assert metadata["format"] == "torchrec_ext.sparse_model"
    assert metadata["format_version"] == "1"
    assert json.loads(metadata["collection"])["tables"][0] == {
        "name": "some",
        "rows": 50,
        "dim": 6,
        "dtype": "float32",
        "pooling": "mean",
        "feature_names": ["f0", "f1"],
        "optimizer": "ftrl",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    sparse_model.save(bags(), path)
    with pytest.raises(SparseModelError, match=r"model\.safetensors exists"):
        sparse_model.save(bags(), path)
    content = path.read_bytes()
    for size in (0, 5, 200, len(content) - 1):
        (tmp_path / "short").write_bytes(content[:size])
        with pytest.raises(SparseModelError, match="short is cut short or is no safetensors file"):
            sparse_model.load(tmp_path / "short")
    with pytest.raises(SparseModelError, match="absent: no such file"):
        sparse_model.load(tmp_path / "absent")
    with pytest.raises(SparseModelError, match=r"is a folder; .* model\.safetensors"):
        sparse_model.load(tmp_path)
    with pytest.raises(SparseModelError, match="cannot write"):
        sparse_model.save(bags(), tmp_path / "no" / "folder")


def _rewritten(source: Path, target: Path, **changed: object) -> None:
    """Copy a file with other tensors, format version or entries of its first table."""
    with safe_open(source, framework="pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    collection = json.loads(metadata["collection"])
    metadata["format"] = changed.pop("format", metadata["format"])
    metadata["format_version"] = changed.pop("format_version", "1")
    tensors.update(changed.pop("tensors", {}))  # type: ignore[call-overload]
    collection["tables"][0].update(changed)
    metadata["collection"] = json.dumps(collection)
    save_file(tensors, target, metadata=metadata)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format_version": "2"}, "has format version 2, .* reads version 1"),
        ({"format": "other"}, "is no sparse model: its format is 'other'"),
        ({"dim": 5}, r"table 'some' has weights \(20, 6\) torch.float32, expected \(20, 5\)"),
        ({"dtype": "float16"}, r"expected \(20, 6\) float16"),
        ({"rows": 49}, "table 'some' has row ids that do not ascend within its 49 rows"),
        ({"tensors": {"some.row_ids": torch.arange(20).int().flip(0)}}, "do not ascend"),
        ({"tensors": {"some.row_ids": torch.arange(-1, 19).int()}}, "do not ascend"),
        ({"tensors": {"some.row_ids": torch.arange(20)}}, r"row ids \(20,\) torch.int64, expected"),
        ({"tensors": {"some.row_ids": torch.ones(20, 1).int()}}, r"row ids \(20, 1\) torch.int32"),
        ({"name": "other"}, r"is damaged: it has no 'other\.row_ids'"),
        ({"dtype": "float3"}, r"is damaged: table 'some' .* expected \(20, 6\) float3"),
        ({"pooling": "sun"}, "is damaged: table 'some' has the pooling 'sun'"),
        ({"pooling": None}, "some of its tables have a pooling, others have none"),
        (
            {
                "dtype": "bfloat16",
                "tensors": {"some.weight": torch.ones(20, 6, dtype=torch.bfloat16)},
            },
            "table 'some' has weights torch.bfloat16",
        ),
    ],
)
def test_contents_that_do_not_fit_are_named(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    sparse_model.save(bags(), tmp_path / "good")
    _rewritten(tmp_path / "good", tmp_path / "bad", **changed)
    with pytest.raises(SparseModelError, match=message) as raised:
        sparse_model.load(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(raised.value)


def _weights() -> dict[str, torch.Tensor]:
    weights = {table.name: torch.randn(table.rows, table.dim) for table in SEQUENCE_TABLES}
    weights["t0"][::3] = 0.0
    weights["t1"][:] = 0.0
    return weights


def _save_sharded(folder: str, pooled: bool, weights: dict[str, torch.Tensor]) -> None:
    fused: dict[str, Any] = {"optimizer": OptimType.FTRL, "learning_rate": 0.1}
    sharders = [
        EmbeddingBagCollectionSharder(fused) if pooled else EmbeddingCollectionSharder(fused)
    ]
    model = Model(SEQUENCE_TABLES, pooled=pooled)
    sharded = shard(model, sharders, plan_for(model, sharders, "row_wise", SEQUENCE_TABLES))
    write_weights(sharded, weights)
    dcp.save(sharded.state_dict(), checkpoint_id=folder)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_checkpoint_of_two_ranks(pooled: bool, tmp_path: Path) -> None:
    weights = _weights()
    run_on_ranks(2, _save_sharded, str(tmp_path / "checkpoint"), pooled, weights)
    model = Model(SEQUENCE_TABLES, pooled=pooled)
    dcp.load(model.state_dict(), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    whole: EmbeddingBagCollection | EmbeddingCollection = model.ebc if pooled else model.ec
    sparse_model.save(whole, tmp_path / "model")
    for table in sparse_model.read(tmp_path / "model").tables:
        rows = (weights[table.name] != 0).any(dim=1).nonzero().flatten()
        assert torch.equal(table.row_ids, rows.int())
        assert torch.equal(table.weight, weights[table.name][rows])
    sparse = sparse_model.load(tmp_path / "model")
    features = batches(1, SEQUENCE_TABLES)[0].of_rank(0, 1)
    expected, found = whole(features), sparse(features)
    for key in ("f0", "f1", "f2", "f3"):
        pair = (found[key], expected[key])
        left, right = pair if pooled else (each.values() for each in pair)
        assert torch.equal(left, right)
        assert key == "f1" or left.count_nonzero() > 0
