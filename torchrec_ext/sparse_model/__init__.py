"""Embedding collections without their zero rows: to save, load and serve.

A zero row is one whose weights all equal 0.0. :func:`save` writes the other rows of a collection
and their numbers, :func:`load` builds a module that gives the outputs of the whole collection from
them, and :func:`quantize` makes its rows int8 or float16. ``docs/sparse_models.md`` has an example.
"""

from torchrec_ext.sparse_model.errors import SparseModelError
from torchrec_ext.sparse_model.files import FORMAT_VERSION, read, save, write
from torchrec_ext.sparse_model.modules import (
    KeptRows,
    SparseEmbeddingBagCollection,
    SparseEmbeddingCollection,
    load,
)
from torchrec_ext.sparse_model.quantize import quantize
from torchrec_ext.sparse_model.tables import (
    SparseCollection,
    SparseTable,
    prune_collection,
    prune_table,
)

__all__ = [
    "FORMAT_VERSION",
    "KeptRows",
    "SparseCollection",
    "SparseEmbeddingBagCollection",
    "SparseEmbeddingCollection",
    "SparseModelError",
    "SparseTable",
    "load",
    "prune_collection",
    "prune_table",
    "quantize",
    "read",
    "save",
    "write",
]
