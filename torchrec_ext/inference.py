"""From a sharded model to an unsharded one, for export and quantisation.

.. code-block:: python

    weights = gather_weights(sharded)  # on every rank
    if torch.distributed.get_rank() == 0:
        model = Model(device="cpu")  # unsharded, of the same configs
        model.load_state_dict(weights)
        quantized = quantize_embeddings(model, dtype=torch.qint8, inplace=True)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from torchrec_ext.distributed.checkpoint_checks import global_shape


class _Part(NamedTuple):
    """Where a shard begins in its table, and its size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


def gather_weights(
    model: torch.nn.Module,
    *,
    all_ranks: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The whole weights of a sharded model, as the state dict of the unsharded one.

    A collective call: every rank of the group makes it. It takes the memory of one table at a time
    in addition to the result. Rows that sleep (``sparse_mode="dense"``) are brought up to date.

    Args:
        model: A ``DistributedModelParallel``, a ``DMPCollection`` (whose replicas should be equal:
            call ``sync()`` first) or a sharded module; with any optimizer, also FBGEMM's.
        all_ranks: Whether every rank gets the weights, or only the group's first.
        process_group: All ranks that have shards of the model; None: all ranks.

    Returns:
        Tensors on the CPU by the names that the unsharded model's ``state_dict()`` has, in the
        dtypes of the sharded ones; copies. Empty on ranks that do not get them.

    Raises:
        TypeError: A tensor is distributed in a form that TorchRec does not give tables.
        RuntimeError: The ranks of the group have no shard of a part of a table.
    """
    group = process_group or dist.group.WORLD
    state_dict = model.state_dict()  # wakes rows
    own = {
        name: _local_parts(name, value)
        for name, value in state_dict.items()
        if isinstance(value, ShardedTensor | DTensor)
    }
    layouts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(layouts, {name: list(parts) for name, parts in own.items()}, group)
    receives = all_ranks or dist.get_rank(group) == 0
    result = {}
    for name, value in state_dict.items():
        if name in own:
            full = _gathered(
                name, value, own[name], [each[name] for each in layouts], group, all_ranks
            )
        else:
            full = value.detach().to("cpu", copy=True) if receives else None
        if full is not None:
            result[name] = full
    return result


def _local_parts(name: str, value: Any) -> dict[_Part, Tensor]:
    if isinstance(value, ShardedTensor):
        shards = [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
    else:
        local: Any = value.to_local()
        if not hasattr(local, "local_shards"):
            raise TypeError(
                f"{name} is a DTensor of {type(local).__name__}, expected TorchRec's "
                "LocalShardsWrapper; gather it with full_tensor()"
            )
        # Without any shard TorchRec's wrapper has an offset all the same.
        shards = list(zip(local.local_offsets(), local.local_shards(), strict=False))
    return {
        _Part(tuple(offsets), tuple(tensor.shape)): tensor.detach()
        for offsets, tensor in shards
        if tensor.numel() > 0
    }


def _gathered(
    name: str,
    value: Any,
    own: dict[_Part, Tensor],
    layouts: list[list[_Part]],
    group: Any,
    all_ranks: bool,
) -> Tensor | None:
    """One table from everybody's shards; None where this rank does not get it."""
    shape = global_shape(value)
    assert shape is not None
    owners: dict[_Part, int] = {}
    for owner, parts in enumerate(layouts):
        for part in parts:
            owners.setdefault(part, owner)  # replicas have the same
    if sum(math.prod(part.sizes) for part in owners) != math.prod(shape):
        raise RuntimeError(
            f"{name} has shape {shape}, but the ranks of the group have only the shards "
            f"{sorted(owners)}; give the process group of all ranks that have some"
        )
    rank = dist.get_rank(group)
    full = torch.empty(shape, dtype=value.dtype) if all_ranks or rank == 0 else None
    for part, owner in owners.items():
        shard = _moved(own.get(part), part, owner, value, group, all_ranks)
        if full is not None:
            full[part.region] = shard.to("cpu")
    return full


def _moved(
    shard: Tensor | None, part: _Part, owner: int, value: Any, group: Any, all_ranks: bool
) -> Tensor:
    """A shard on the ranks that get it; on the others something of its shape."""
    rank = dist.get_rank(group)
    buffer = torch.empty(part.sizes, dtype=value.dtype, device=value.device)
    if rank == owner:
        assert shard is not None
        buffer = shard.contiguous()
    source = dist.get_global_rank(group, owner)
    if all_ranks:
        dist.broadcast(buffer, source, group=group)
    elif owner != 0 and rank == owner:
        dist.send(buffer, dist.get_global_rank(group, 0), group=group)
    elif owner != 0 and rank == 0:
        dist.recv(buffer, source, group=group)
    return buffer
