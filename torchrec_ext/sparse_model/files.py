"""Files of sparse models: safetensors with two tensors for each table.

``<table>.row_ids`` is ``[kept]`` int32 or int64, ascending; ``<table>.weight`` is ``[kept, dim]``.
The metadata has ``format``, ``format_version`` and, as JSON, ``collection``: whether it is weighted
and, table by table in the collection's order, name, rows, dim, dtype, pooling, feature names and
optimizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_ext.optim_type import OptimType
from torchrec_ext.sparse_model.errors import SparseModelError
from torchrec_ext.sparse_model.tables import (
    DTYPES,
    POOLINGS,
    SparseCollection,
    SparseTable,
    prune_collection,
)
from torchrec_ext.sparsity import row_id_dtype

FORMAT = "torchrec_ext.sparse_model"
#: Counts changes after which older versions of this package read a file wrongly.
FORMAT_VERSION = 1
SUFFIX = ".safetensors"


def save(
    collection: EmbeddingBagCollection | EmbeddingCollection,
    path: str | Path,
    optimizers: Mapping[str, str | OptimType] | None = None,
) -> None:
    """Write the rows of a collection that are not zero.

    Args:
        collection: See ``prune_collection``.
        path: The file, which must not exist.
        optimizers: See ``prune_collection``.

    Raises:
        SparseModelError: The file exists or cannot be written.
        TypeError, ValueError: See ``prune_collection``.
    """
    write(prune_collection(collection, optimizers), path)


def write(collection: SparseCollection, path: str | Path) -> None:
    """Write a collection; the file is whole or absent.

    Args:
        collection: What to write.
        path: The file, which must not exist; its folder must.

    Raises:
        SparseModelError: The file exists or cannot be written.
    """
    path = Path(path)
    if path.exists():
        raise SparseModelError(f"{path} exists; remove it or choose another name")
    tensors = {}
    for table in collection.tables:
        tensors[f"{table.name}.row_ids"] = table.row_ids.contiguous()
        tensors[f"{table.name}.weight"] = table.weight.contiguous()
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "collection": json.dumps(_described(collection)),
    }
    write_tensors(tensors, path, metadata)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors and what is said of them; the file is whole or absent.

    Raises:
        SparseModelError: The file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(dict(tensors), partial, metadata=metadata)
        partial.chmod(mode)  # safetensors lets nobody else read
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise SparseModelError(f"cannot write {path}: {error}") from error


def read(path: str | Path) -> SparseCollection:
    """Read what ``write`` wrote.

    Raises:
        SparseModelError: The file cannot be read, is cut short, is no sparse model, or is of a
            format version that this package does not know.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
        raise SparseModelError(f"{path} is a folder; choose one of its files: {', '.join(files)}")
    if not path.is_file():
        raise SparseModelError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            _check_format(path, metadata)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        text = " ".join(str(error).split())
        raise SparseModelError(f"{path} is cut short or is no safetensors file: {text}") from error
    try:
        return _collection(json.loads(metadata["collection"]), tensors)
    except KeyError as error:
        raise SparseModelError(f"{path} is damaged: it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise SparseModelError(f"{path} is damaged: {error}") from error


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise SparseModelError(
            f"{path} is no sparse model: its format is {metadata.get('format')!r}, not {FORMAT!r}"
        )
    version = metadata.get("format_version")
    if version != str(FORMAT_VERSION):
        raise SparseModelError(
            f"{path} has format version {version}, and this torchrec_ext reads version "
            f"{FORMAT_VERSION}; load it with the torchrec_ext that wrote it, or write it anew"
        )


def _described(collection: SparseCollection) -> dict[str, Any]:
    return {
        "is_weighted": collection.is_weighted,
        "need_indices": collection.need_indices,
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "dtype": str(table.weight.dtype).removeprefix("torch."),
                "pooling": table.pooling,
                "feature_names": list(table.feature_names),
                "optimizer": table.optimizer,
            }
            for table in collection.tables
        ],
    }


def _collection(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseCollection:
    tables = tuple(_table(each, tensors) for each in content["tables"])
    if not tables:
        raise ValueError("it has no table")
    if len({table.pooling is None for table in tables}) > 1:
        raise ValueError("some of its tables have a pooling, others have none")
    return SparseCollection(tables, content["is_weighted"], content["need_indices"])


def _table(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SparseTable:
    name, rows = content["name"], content["rows"]
    ids, weight = tensors[f"{name}.row_ids"], tensors[f"{name}.weight"]
    if content["pooling"] not in (*POOLINGS, None):
        raise ValueError(f"table {name!r} has the pooling {content['pooling']!r}")
    if ids.dim() != 1 or ids.dtype != row_id_dtype(rows):
        raise ValueError(
            f"table {name!r} has row ids {tuple(ids.shape)} {ids.dtype}, expected [kept] "
            f"{row_id_dtype(rows)}"
        )
    expected = (len(ids), content["dim"])
    if weight.shape != expected or str(weight.dtype) != f"torch.{content['dtype']}":
        raise ValueError(
            f"table {name!r} has weights {tuple(weight.shape)} {weight.dtype}, expected {expected} "
            f"{content['dtype']}"
        )
    if weight.dtype not in DTYPES:
        raise ValueError(f"table {name!r} has weights {weight.dtype}")
    if len(ids) > 0 and not (
        int(ids[0]) >= 0 and int(ids[-1]) < rows and bool((ids.diff() > 0).all())
    ):
        raise ValueError(f"table {name!r} has row ids that do not ascend within its {rows} rows")
    return SparseTable(
        name,
        rows,
        tuple(content["feature_names"]),
        content["pooling"],
        content["optimizer"],
        ids,
        weight,
    )
