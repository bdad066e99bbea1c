"""Saving beside training."""

from __future__ import annotations

import functools
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager

# The last save on our own group, until the next one.
_unfinished: list[Future[Any]] = []


def async_save(state_dict: dict[str, Any], **keywords: Any) -> Future[Any]:
    """``torch.distributed.checkpoint.async_save`` with a stager that can copy sharded tables.

    The default one cannot copy a ``ShardedTensor``. This one copies weights and states to host
    memory before the call returns; training may go on while they are written. A collective call,
    which makes a process group of its own the first time: on the group of the training, the
    messages of the two would get mixed up. As those of two saves would: a call waits until the one
    before it is written.

    Args:
        state_dict: As for ``torch.distributed.checkpoint.save``.
        **keywords: Those of ``torch.distributed.checkpoint.async_save``: ``checkpoint_id``, or a
            ``process_group`` over gloo that nobody else uses, for instance.

    Returns:
        Done when this rank's files are written; its ``result()`` raises what went wrong.

    Raises:
        ValueError: ``async_stager`` was given; call torch's function for another stager.

    Example:
        >>> future = async_save(  # doctest: +SKIP
        ...     {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()},
        ...     checkpoint_id="checkpoints/1000",
        ... )
        >>> future.result()  # doctest: +SKIP
    """
    if "async_stager" in keywords:
        raise ValueError(
            f"async_stager={keywords['async_stager']!r}: async_save() is there to choose it; call "
            "torch.distributed.checkpoint.async_save() for another one"
        )
    own = keywords.get("process_group") is None and dist.is_initialized()
    if own:
        keywords["process_group"] = _own_group(dist.distributed_c10d._get_default_group())
        wait(_unfinished)
        _unfinished.clear()
    # A cached copy would be overwritten by the next call while it is still being written.
    stager = BlockingAsyncStager(cache_staged_state_dict=False)
    saved = dcp.async_save(state_dict, async_stager=stager, **keywords)
    assert isinstance(saved, Future)
    if own:
        _unfinished.append(saved)
    return saved


@functools.lru_cache(maxsize=1)
def _own_group(default: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the ranks of the default group, made once for each default group."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
