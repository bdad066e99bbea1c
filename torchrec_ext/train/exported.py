"""The model in a folder that ``torchrec-ext export`` wrote."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from torchrec_ext import sparse_model
from torchrec_ext.sparse_model import SparseModelError
from torchrec_ext.sparse_model.files import SUFFIX
from torchrec_ext.train.config import ModelConfig
from torchrec_ext.train.data import Examples
from torchrec_ext.train.model import Model, build_model

#: The file of the parameters that are no tables.
DENSE = f"dense{SUFFIX}"


def load_model(folder: Path, config: ModelConfig, examples: Examples) -> Model:
    """Build the model of a folder that ``torchrec-ext export`` wrote.

    Args:
        folder: The folder.
        config: Section ``model`` of its configuration.
        examples: Any part of the data set, for the names and sizes of its features.

    Raises:
        SparseModelError: A file cannot be read or is not a sparse model that this version reads,
            or the parameters are not those of ``config``.
    """
    model = build_model(config, examples)
    files = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if path.name != DENSE]
    collections = [path.name.removesuffix(SUFFIX) for path in files]
    for path, collection in zip(files, collections, strict=True):
        model.set_submodule(collection, sparse_model.load(path))
    try:
        found = model.load_state_dict(load_file(folder / DENSE), strict=False, assign=True)
    except (OSError, SafetensorError) as error:
        raise SparseModelError(f"cannot read {folder / DENSE}: {error}") from error
    except RuntimeError as error:  # sizes differ
        text = " ".join(str(error).split())
        raise SparseModelError(f"{folder} holds another model: {text}") from error
    loaded = tuple(f"{collection}." for collection in collections)
    missing = [name for name in found.missing_keys if not name.startswith(loaded)]
    if missing or found.unexpected_keys:
        raise SparseModelError(
            f"{folder} holds another model: it lacks {missing} and has {found.unexpected_keys}"
        )
    return model
