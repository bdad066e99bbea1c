"""Sparse models with rows of lower precision."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedEmbeddingCollection

from torchrec_ext.sparse_model.modules import KeptRows, SparseModule

_QUANTIZED = (torch.qint8, torch.float16)
Module = TypeVar("Module", bound=nn.Module)


def quantize(module: Module, dtype: torch.dtype) -> Module:
    """Copy a module with quantised rows, by TorchRec's own quantised collections.

    The zero row stays exactly zero.

    Args:
        module: One that ``load`` gave, or any that holds such ones.
        dtype: ``torch.qint8``, with a scale and a bias for each row, or ``torch.float16``.

    Raises:
        ValueError: Another ``dtype``, a module without such collections, or a table with an odd
            number of columns and ``torch.qint8``.
    """
    if dtype not in _QUANTIZED:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(map(str, _QUANTIZED))}")
    parts = [part for part in module.modules() if isinstance(part, SparseModule)]
    if not parts:
        raise ValueError(f"{type(module).__name__} holds no sparse collection; load() gives one")
    for part in parts:
        if not isinstance(part.collection, EmbeddingBagCollection | EmbeddingCollection):
            raise ValueError("the collection is quantised already; quantize what load() gives")
        for kept in (each for each in part.modules() if isinstance(each, KeptRows)):
            if dtype == torch.qint8 and kept.dim % 2 != 0:
                raise ValueError(
                    f"table {kept.table!r} has {kept.dim} columns; FBGEMM's int8 rows have "
                    "an even number: choose torch.float16"
                )
    with warnings.catch_warnings():
        # TorchRec's, about where its quantisation lives in torch.
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated")
        return quantize_embeddings(
            module,
            dtype,
            inplace=False,
            additional_qconfig_spec_keys=[EmbeddingCollection],
            additional_mapping={EmbeddingCollection: QuantizedEmbeddingCollection},
        )
