"""Tables of any width on the CPU: what stands between them and FBGEMM's CPU lookup.

The lookup itself takes every dim. FBGEMM asks for multiples of 4 in one place, the function that
lays tables out in its flat buffers, because its CUDA kernels read four columns at a time.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import fbgemm_gpu
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitState,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    construct_split_state as fbgemm_construct_split_state,
)

#: The widths that FBGEMM's own layout takes are the multiples of this.
FBGEMM_WIDTH = 4

Spec = tuple[int, int, Any, Any]


def fbgemm_takes(embedding_specs: Sequence[Spec]) -> bool:
    """Whether FBGEMM itself lays out tables of these dims."""
    return all(dim % FBGEMM_WIDTH == 0 for _, dim, _, _ in embedding_specs)


def construct_split_state(
    embedding_specs: Sequence[Spec], rowwise: bool, cacheable: bool, **keywords: Any
) -> SplitState:
    """Lays tables out one behind the other, as FBGEMM's function of this name does.

    Args:
        embedding_specs: ``(rows, dim, location, compute device)`` of each table. Where a dim is no
            multiple of 4, all tables are on the host, in float32 or float16.
        rowwise: One element for each row instead of a row.
        cacheable: Whether FBGEMM's cache may hold the tables, which are not on the host then.
        **keywords: FBGEMM's others, of which only tables that are not on the host depend.
    """
    if fbgemm_takes(embedding_specs):
        return fbgemm_construct_split_state(
            list(embedding_specs), rowwise=rowwise, cacheable=cacheable, **keywords
        )
    sizes = [rows if rowwise else rows * dim for rows, dim, _, _ in embedding_specs]
    return SplitState(
        dev_size=0,
        host_size=sum(sizes),
        uvm_size=0,
        placements=[EmbeddingLocation.HOST] * len(sizes),
        offsets=list(itertools.accumulate(sizes[:-1], initial=0)),
    )


def constructor_of(
    module: SplitTableBatchedEmbeddingBagsCodegen, embedding_specs: Sequence[Spec]
) -> Callable[..., None]:
    """The constructor of FBGEMM's module for tables of these dims, bound to ``module``.

    Where FBGEMM would not lay them out, it is FBGEMM's code with the layout above in place of its
    own. That is a function apart: FBGEMM's modules and its own optimizers stay as they are.

    Raises:
        RuntimeError: The installed FBGEMM lays out its weights elsewhere.
    """
    constructor = SplitTableBatchedEmbeddingBagsCodegen.__init__
    if fbgemm_takes(embedding_specs):
        return functools.partial(constructor, module)
    code = inspect.unwrap(constructor)
    name = "construct_split_state"
    if not isinstance(code, types.FunctionType) or name not in code.__code__.co_names:
        dims = sorted({dim for _, dim, _, _ in embedding_specs if dim % FBGEMM_WIDTH != 0})
        raise RuntimeError(
            f"dims {dims} are no multiples of {FBGEMM_WIDTH}, and torchrec_ext does not know how "
            f"FBGEMM {fbgemm_gpu.__version__} lays out its weights; use multiples of "
            f"{FBGEMM_WIDTH}, or FBGEMM 1.8 or 1.9"
        )
    own = types.FunctionType(
        code.__code__,
        {**code.__globals__, name: construct_split_state},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    own.__kwdefaults__ = code.__kwdefaults__
    return functools.partial(own, module)
