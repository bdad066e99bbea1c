"""A collection without its zero rows gives the whole collection's outputs, bit for bit."""

from pathlib import Path

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig

from torchrec_ext import sparse_model

# name -> (rows, dim of bags, features, how many of ten rows are zero)
TABLES = {
    "some": (50, 6, ("f0", "f1"), 6),
    "narrow": (30, 1, ("f1", "f2"), 5),
    "zero": (20, 8, ("f3",), 10),
    "full": (20, 4, ("f4",), 0),
    "one": (1, 4, ("f5",), 0),
    "one_zero": (1, 2, ("f6",), 10),
}
ROWS = {"f0": 50, "f1": 30, "f2": 30, "f3": 20, "f4": 20, "f5": 1, "f6": 1}


def _zeroed(weight: torch.Tensor, tenths: int) -> None:
    weight.data[torch.arange(len(weight)) % 10 < tenths] = 0.0


def bags(
    pooling: PoolingType = PoolingType.SUM,
    weighted: bool = False,
    data_type: DataType = DataType.FP32,
) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=list(features),
            pooling=pooling,
            data_type=data_type,
        )
        for name, (rows, dim, features, _) in TABLES.items()
    ]
    collection = EmbeddingBagCollection(configs, is_weighted=weighted)
    for name, (_, _, _, tenths) in TABLES.items():
        _zeroed(collection.embedding_bags[name].weight, tenths)
    return collection


def _sequences(need_indices: bool = False) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(
            name=name, num_embeddings=rows, embedding_dim=6, feature_names=list(features)
        )
        for name, (rows, _, features, _) in TABLES.items()
    ]
    collection = EmbeddingCollection(tables=configs, need_indices=need_indices)
    for name, (_, _, _, tenths) in TABLES.items():
        _zeroed(collection.embeddings[name].weight, tenths)
    return collection


def _batch(
    weights_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """64 bags of every feature with 0 to 5 lookups, keys in another order than the tables'."""
    keys = ["f3", "f0", "unused", "f2", "f1", "f6", "f5", "f4"]
    lengths = [torch.randint(0, 6, (64,)) for _ in keys]
    values = [
        torch.randint(0, ROWS.get(key, 9), (int(each.sum()),))
        for key, each in zip(keys, lengths, strict=True)
    ]
    weights = None
    if weights_dtype is not None:
        weights = torch.randn(sum(map(len, values))).to(weights_dtype)
    return KeyedJaggedTensor(
        keys, torch.cat(values).to(dtype), weights=weights, lengths=torch.cat(lengths).to(dtype)
    )


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), expected.detach().view(torch.int32))


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize(
    ("pooling", "weighted"),  # torch.nn.EmbeddingBag has no weighted mean
    [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, False)],
)
def test_bags(tmp_path: Path, pooling: PoolingType, weighted: bool, data_type: DataType) -> None:
    whole = bags(pooling, weighted, data_type)
    sparse_model.save(whole, tmp_path / "model")
    sparse = sparse_model.load(tmp_path / "model")
    # torch.nn.EmbeddingBag wants per-sample weights of the table's dtype.
    precision = torch.float16 if data_type == DataType.FP16 else torch.float32
    features = _batch(precision if weighted else None)
    expected, found = whole(features), sparse(features)
    assert expected.keys() == ["f0", "f1@some", "f1@narrow", "f2", "f3", "f4", "f5", "f6"]
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    _assert_same_bits(found.values(), expected.values())
    assert found.values().count_nonzero() > 0


def test_rows_that_are_kept() -> None:
    tables = {table.name: table for table in sparse_model.prune_collection(bags()).tables}
    assert tables["some"].row_ids.tolist() == [row for row in range(50) if row % 10 >= 6]
    assert tables["zero"].row_ids.tolist() == []
    assert tables["full"].row_ids.tolist() == list(range(20))
    assert [len(table.weight) for table in tables.values()] == [20, 15, 0, 20, 1, 0]
    assert all(table.row_ids.dtype == torch.int32 for table in tables.values())
    # One zero row more, and nothing that grows with the rows of the whole table.
    module = sparse_model.SparseEmbeddingBagCollection(sparse_model.prune_collection(bags()))
    sizes = {name: tensor.numel() for name, tensor in module.state_dict().items()}
    assert sizes["collection.embedding_bags.some.weight"] == 21 * 6
    assert sizes["kept_rows.0.row_ids"] == 21


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_by_hand(dtype: torch.dtype) -> None:
    weight = torch.tensor([[0.0], [1.0], [0.0], [0.0], [2.0]])
    table = sparse_model.prune_table(weight, "t", ("f",), "sum")
    positions = sparse_model.KeptRows(table)(torch.tensor([4, 0, 1, 3, 2], dtype=dtype), "f")
    assert positions.tolist() == [1, 2, 0, 2, 2]
    assert positions.dtype == dtype


def test_zero_rows_count_in_a_mean() -> None:
    """By hand: one row of four lookups that is not zero, an empty bag, a bag of zero rows."""
    config = EmbeddingBagConfig(
        name="t", num_embeddings=3, embedding_dim=1, feature_names=["f"], pooling=PoolingType.MEAN
    )
    whole = EmbeddingBagCollection([config])
    whole.embedding_bags["t"].weight.data = torch.tensor([[0.0], [0.0], [8.0]])
    sparse = sparse_model.SparseEmbeddingBagCollection(sparse_model.prune_collection(whole))
    features = KeyedJaggedTensor(
        ["f"], torch.tensor([2, 0, 0, 0, 1, 0]), lengths=torch.tensor([4, 0, 2])
    )
    assert sparse(features).values().tolist() == [[2.0], [0.0], [0.0]]
    assert whole(features).values().tolist() == [[2.0], [0.0], [0.0]]


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences(tmp_path: Path, need_indices: bool) -> None:
    whole = _sequences(need_indices)
    sparse_model.save(whole, tmp_path / "model")
    sparse = sparse_model.load(tmp_path / "model")
    features = _batch()
    expected, found = whole(features), sparse(features)
    assert found.keys() == expected.keys() and len(found) == 8
    for key, jagged in expected.items():
        _assert_same_bits(found[key].values(), jagged.values())
        assert torch.equal(found[key].lengths(), jagged.lengths())
        if need_indices:
            assert torch.equal(found[key].weights(), jagged.weights())
        else:
            assert found[key].weights_or_none() is None


def test_int32_indices() -> None:
    whole = bags()
    sparse = sparse_model.SparseEmbeddingBagCollection(sparse_model.prune_collection(whole))
    features = _batch(dtype=torch.int32)
    _assert_same_bits(sparse(features).values(), whole(features).values())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_quantised_bags(pooling: PoolingType, dtype: torch.dtype) -> None:
    whole = bags(pooling)
    content = sparse_model.prune_collection(whole)
    if dtype == torch.qint8:
        with pytest.raises(ValueError, match="table 'narrow' has 1 columns"):
            sparse_model.quantize(sparse_model.SparseEmbeddingBagCollection(content), dtype)
        tables = tuple(table for table in content.tables if table.dim > 1)
        content = sparse_model.SparseCollection(tables)
    sparse = sparse_model.SparseEmbeddingBagCollection(content)
    quantised = sparse_model.quantize(sparse, dtype)
    features = _batch()
    expected, found = sparse(features).to_dict(), quantised(features).to_dict()
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        # Rows are within 1 / sqrt(rows) of zero. A step of int8 is 2 / 255 of that, half a step
        # is the error of a lookup, of which a sum has up to 5.
        bound = 1.0 if key in ("f5", "f6") else 20**-0.5
        step = bound / 2048 if dtype == torch.float16 else bound / 255
        assert float((found[key] - values).abs().max()) <= 5 * step, key
    assert torch.equal(found["f3"], torch.zeros(64, 8))
    assert not torch.equal(found["f0"], expected["f0"])
    with pytest.raises(ValueError, match="quantised already"):
        sparse_model.quantize(quantised, dtype)


def test_quantised_sequences() -> None:
    content = sparse_model.prune_collection(_sequences(need_indices=True))
    sparse = sparse_model.SparseEmbeddingCollection(content)
    quantised = sparse_model.quantize(torch.nn.Sequential(sparse), torch.qint8)
    features = _batch()
    expected, found = sparse(features), quantised(features)
    for key, jagged in expected.items():
        bound = 1.0 if key in ("f5", "f6") else 20**-0.5
        assert float((found[key].values() - jagged.values()).abs().max()) <= bound / 255
        assert torch.equal(found[key].weights(), jagged.weights())
    assert torch.equal(found["f3"].values(), torch.zeros_like(expected["f3"].values()))


def test_training_is_off() -> None:
    sparse = sparse_model.SparseEmbeddingBagCollection(sparse_model.prune_collection(bags()))
    assert not any(parameter.requires_grad for parameter in sparse.parameters())


def test_wrong_lookups_are_named() -> None:
    sparse = sparse_model.SparseEmbeddingBagCollection(sparse_model.prune_collection(bags()))
    for index in (-1, 30):
        features = _batch()
        features["f2"].values()[3] = index
        with pytest.raises(IndexError, match=f"feature 'f2': index {index} is no row of table 'na"):
            sparse(features)
    with pytest.raises(KeyError, match="feature 'f0' of table 'some' is not in the batch"):
        sparse(KeyedJaggedTensor(["f1"], torch.tensor([0]), lengths=torch.tensor([1])))


def test_what_cannot_be_pruned_is_named() -> None:
    meta = EmbeddingBagCollection(bags().embedding_bag_configs(), device=torch.device("meta"))
    with pytest.raises(ValueError, match="table 'some' is on the meta device"):
        sparse_model.prune_collection(meta)
    with pytest.raises(TypeError, match="cannot prune a Linear"):
        sparse_model.prune_collection(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizers: no table 'tabel'"):
        sparse_model.prune_collection(bags(), {"tabel": "ftrl"})
    with pytest.raises(TypeError, match="table 't' is torch.float64"):
        sparse_model.prune_table(torch.zeros(1, 1).double(), "t", ("f",), "sum")
    with pytest.raises(ValueError, match="Linear holds no sparse collection"):
        sparse_model.quantize(torch.nn.Linear(1, 1), torch.qint8)
    with pytest.raises(ValueError, match="dtype=torch.float32 is not one of"):
        sparse_model.quantize(torch.nn.Linear(1, 1), torch.float32)
