"""Tables of any width: what stands between them and FBGEMM, whose widths are multiples of 4.

FBGEMM asks for those in the function that lays tables out in its flat buffers. Its CPU lookup takes
every dim; its CUDA lookup reads four columns at a time, and ours is in its place there.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitState,
    SplitTableBatchedEmbeddingBagsCodegen,
    invokers,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    construct_split_state as fbgemm_construct_split_state,
)
from torch import Tensor

from torchrec_ext import empty_tables, ops

if TYPE_CHECKING:
    from torchrec_ext.tbe import TableBatchedEmbeddingBags

#: The widths that FBGEMM's own layout takes are the multiples of this.
FBGEMM_WIDTH = 4
#: What FBGEMM's CUDA lookup gives, but for quantized outputs.
OUTPUT_DTYPES = (SparseType.FP32, SparseType.FP16, SparseType.BF16)

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
            multiple of 4, all tables are on the host, or all in a device's own memory, in
            float32, float16 or bfloat16.
        rowwise: One element for each row instead of a row.
        cacheable: Whether FBGEMM's cache may hold the tables, which are not on the host then.
        **keywords: FBGEMM's others, of which only its own layout depends.
    """
    if fbgemm_takes(embedding_specs):
        return fbgemm_construct_split_state(
            list(embedding_specs), rowwise=rowwise, cacheable=cacheable, **keywords
        )
    sizes = [rows if rowwise else rows * dim for rows, dim, _, _ in embedding_specs]
    placements = [location for _, _, location, _ in embedding_specs]
    on_host = placements[0] == EmbeddingLocation.HOST
    return SplitState(
        dev_size=0 if on_host else sum(sizes),
        host_size=sum(sizes) if on_host else 0,
        uvm_size=0,
        placements=placements,
        offsets=list(itertools.accumulate(sizes[:-1], initial=0)),
    )


def check_on_device(
    embedding_specs: Sequence[Spec], names: Sequence[str], output_dtype: SparseType
) -> None:
    """Checks what tables on CUDA need beside one whose dim is no multiple of 4.

    Raises:
        ValueError: A table is in managed memory or cached, or the output is quantized.
    """
    if fbgemm_takes(embedding_specs):
        return
    named = list(zip(names, embedding_specs, strict=True))
    odd, dim = next((name, spec[1]) for name, spec in named if spec[1] % FBGEMM_WIDTH != 0)
    reason = f"dim {dim} of table {odd!r} is no multiple of {FBGEMM_WIDTH}"
    for name, (_, _, location, _) in named:
        if location != EmbeddingLocation.DEVICE:
            raise ValueError(
                f"table {name!r} is in {EmbeddingLocation(location).name}, but {reason}, and the "
                "tables of such a module are in EmbeddingLocation.DEVICE; put them there, or use "
                f"embedding_dim={-(-dim // FBGEMM_WIDTH) * FBGEMM_WIDTH}"
            )
    if output_dtype not in OUTPUT_DTYPES:
        raise ValueError(
            f"tables {list(names)}: output_dtype={output_dtype.name}, but {reason}, and the output "
            f"of such a module is one of {[each.name for each in OUTPUT_DTYPES]}"
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
    replaced = {"construct_split_state": construct_split_state}
    return functools.partial(_with(constructor, embedding_specs, replaced), module)


def forward_of(
    module: TableBatchedEmbeddingBags,
    batch: ops.VariableBatch | None,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> Callable[..., Tensor]:
    """FBGEMM's forward, bound to ``module``, with our lookup in place of its own.

    What FBGEMM does before and after, such as the bounds check, stays FBGEMM's.

    Args:
        module: On a device.
        batch: Where bags and their outputs begin, where batch sizes differ.
        batch_sizes: ``[features][ranks]``, these sizes.

    Raises:
        RuntimeError: The installed FBGEMM calls its lookup elsewhere.
    """

    def invoke(common: Any, _: object) -> Tensor:
        return _look_up(module, common, batch, batch_sizes)

    own = types.SimpleNamespace(
        lookup_args=invokers.lookup_args, lookup_sgd=types.SimpleNamespace(invoke=invoke)
    )
    forward = SplitTableBatchedEmbeddingBagsCodegen.forward
    specs = module.embedding_specs
    return functools.partial(_with(forward, specs, {"invokers": own}, "lookup_sgd"), module)


def _look_up(
    module: TableBatchedEmbeddingBags,
    common: Any,
    batch: ops.VariableBatch | None,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> Tensor:
    """Looks up what FBGEMM's ``CommonArgs`` hold of a batch."""
    bags = common.offsets.numel() - 1
    shape = empty_tables.output_shape(module, common.indices.numel(), bags, batch_sizes)
    output = torch.empty(
        shape,
        dtype=SparseType.from_int(common.output_dtype).as_dtype(),
        device=common.indices.device,
    )
    with module._tables_named_in_errors():
        ops.lookup(
            output,
            module._flat_weights.detach(),
            module._table_layout,
            module._feature_table_map,
            common.indices,
            common.offsets,
            common.indice_weights,
            pooling_mode=int(common.pooling_mode),
            variable_batch=batch,
            tables=module._tables,
        )
    return output


def _with(
    function: Callable[..., Any],
    embedding_specs: Sequence[Spec],
    replaced: dict[str, Any],
    *names: str,
) -> types.FunctionType:
    """FBGEMM's code with other globals: a function apart from FBGEMM's, which stays as it is.

    Raises:
        RuntimeError: The code does not name what is to be replaced, or one of ``names``.
    """
    code = inspect.unwrap(function)
    needed = {*replaced, *names}
    if not isinstance(code, types.FunctionType) or not needed <= {*code.__code__.co_names}:
        dims = sorted({dim for _, dim, _, _ in embedding_specs if dim % FBGEMM_WIDTH != 0})
        raise RuntimeError(
            f"dims {dims} are no multiples of {FBGEMM_WIDTH}, and torchrec_ext does not know how "
            f"FBGEMM {fbgemm_gpu.__version__} lays out or looks up its weights; use multiples of "
            f"{FBGEMM_WIDTH}, or FBGEMM 1.8 or 1.9"
        )
    own = types.FunctionType(
        code.__code__,
        {**code.__globals__, **replaced},
        code.__name__,
        code.__defaults__,
        code.__closure__,
    )
    own.__kwdefaults__ = code.__kwdefaults__
    return own
