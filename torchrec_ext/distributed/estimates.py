"""What a table's optimizer adds to the planner's estimates of memory and time.

TorchRec's planner reads the optimizer from the class that was applied to a table and knows its own
and torch's: with ``fused_params`` it counts no states, for another class as many bytes as the
weights have, half of what a float16 table's states take. Nor does its time for the backward pass
depend on the optimizer. The functions here correct both for tables with an optimizer of this
package and touch no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.estimator.estimator import (
    EmbeddingPerfEstimator,
    get_embedding_perf_sharding_evaluator,
)
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import SharderData, ShardingOption, Storage

from torchrec_ext.distributed import table_optimizers
from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.optimizers import State

MANAGED_KERNELS = (
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
)


def states_by_option(
    options: Sequence[ShardingOption], sharder_data_map: Mapping[str, SharderData]
) -> list[tuple[State, ...] | None]:
    """The states that each option's table will have; None for a table that is not ours."""
    # A table has many options: its optimizer is looked up once.
    known: dict[tuple[int, str], tuple[State, ...] | None] = {}
    found = []
    for option in options:
        key = (id(option.tensor), option.module_type_key)
        if key not in known:
            shared = sharder_data_map[option.module_type_key].fused_params
            known[key] = table_optimizers.planned_states(option.tensor, option.name, shared)
        found.append(known[key])
    return found


def state_storage(
    state: State, shard_size: Sequence[int], compute_device: str, compute_kernel: str
) -> Storage:
    """The memory of one state of one shard, where FBGEMM's placement rule puts it.

    That is where the weights are, except that a ``[rows]`` state of a table in managed memory is on
    the device. No state is in FBGEMM's cache.

    Args:
        state: The state.
        shard_size: Rows and columns of the shard. A shard has states of its own, so under
            column-wise sharding a ``[rows]`` state exists once per shard.
        compute_device: The topology's, such as ``"cpu"``.
        compute_kernel: The table's, such as ``"fused"``.
    """
    size = state.bytes_of(*shard_size)
    on_host = compute_device == "cpu" or (compute_kernel in MANAGED_KERNELS and not state.rowwise)
    return Storage(hbm=0, ddr=size) if on_host else Storage(hbm=size, ddr=0)


@contextlib.contextmanager
def without_optimizer(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While open, estimates count no optimizer memory for these tables.

    They carry the class for which TorchRec counts nothing, whatever the sharder's ``fused_params``.
    """
    marks = {"_optimizer_classes": [torch.optim.SGD], "_optimizer_kwargs": [{}]}
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    before = [(tensor, {name: vars(tensor).get(name) for name in marks}) for tensor in distinct]
    try:
        for tensor in distinct:
            vars(tensor).update(marks)
        yield
    finally:
        for tensor, values in before:
            for name, value in values.items():
                if value is None:
                    delattr(tensor, name)
                else:
                    setattr(tensor, name, value)


def estimate_storage(
    original: Function,
    estimator: EmbeddingStorageEstimator,
    options: Sequence[ShardingOption],
    sharder_data_map: Mapping[str, SharderData],
) -> None:
    """Estimates the memory of options: TorchRec's figures, with our tables' states as they are.

    This includes options that sharding would refuse for the optimizer, such as ``dense``: they must
    not look smaller for the states that they drop.

    Args:
        original: TorchRec's ``EmbeddingStorageEstimator.estimate``.
        estimator: Its ``self``.
        options: The options; every shard's ``storage`` is set.
        sharder_data_map: What TorchRec read from the sharders, by the type of module.
    """
    states_of = states_by_option(options, sharder_data_map)
    ours = [
        (option, states)
        for option, states in zip(options, states_of, strict=True)
        if states is not None
    ]
    with without_optimizer(option.tensor for option, _ in ours):
        original(estimator, options, sharder_data_map)
    if estimator._is_inference:
        return
    device = estimator._topology.compute_device
    for option, states in ours:
        for shard in option.shards:
            for state in states:
                shard.storage += state_storage(state, shard.size, device, option.compute_kernel)


def add_state_traffic(
    estimator: EmbeddingPerfEstimator,
    options: Sequence[ShardingOption],
    sharder_data_map: Mapping[str, SharderData],
) -> None:
    """Adds the time to read and write our tables' states to TorchRec's estimate of the backward.

    TorchRec takes ``bwd_compute_multiplier`` (2) times the forward pass, in which each looked-up
    row is read: that stands for reading and writing the weights. The states of these rows are read
    and written as well, once however often a batch looks up a row, at the bandwidth that TorchRec
    assumes for the weights.

    Args:
        estimator: TorchRec's estimator, which has estimated the options.
        options: The options; ``perf.bwd_compute`` of our tables' shards grows.
        sharder_data_map: What TorchRec read from the sharders, by the type of module.
    """
    if estimator.is_inference:
        return
    states_of = states_by_option(options, sharder_data_map)
    for option, states in zip(options, states_of, strict=True):
        if states:
            _add_traffic(estimator, option, sharder_data_map[option.module_type_key], states)


def _add_traffic(
    estimator: EmbeddingPerfEstimator,
    option: ShardingOption,
    sharder_data: SharderData,
    states: Sequence[State],
) -> None:
    contexts = ShardPerfContext.build_shard_perf_contexts(
        config=estimator.config,
        shard_sizes=[shard.size for shard in option.shards],
        sharding_option=option,
        topology=estimator._topology,
        constraints=estimator._constraints,
        sharder_data=sharder_data,
    )
    evaluator = get_embedding_perf_sharding_evaluator(option.sharding_type)
    for shard, context in zip(option.shards, contexts, strict=True):
        lookups = evaluator.get_batch_inputs(context, estimator.config) * context.world_size
        rows = min(lookups, context.hash_size)
        row_bytes = sum(state.bytes_of(1, context.emb_dim) for state in states)
        backward = shard.perf.bwd_compute + 2 * rows * row_bytes / context.device_bw
        shard.perf = dataclasses.replace(shard.perf, bwd_compute=backward)


def _storage(original: Function) -> Function:
    @functools.wraps(original)
    def estimate(self: Any, sharding_options: Any, sharder_data_map: Any) -> None:
        estimate_storage(original, self, sharding_options, sharder_data_map)

    return estimate


def _perf(original: Function) -> Function:
    @functools.wraps(original)
    def estimate(self: Any, sharding_options: Any, sharder_data_map: Any) -> None:
        original(self, sharding_options, sharder_data_map)
        add_state_traffic(self, sharding_options, sharder_data_map)

    return estimate


_PARAMETERS = ("self", "sharding_options", "sharder_data_map")
SEAMS = (
    Seam(EmbeddingStorageEstimator, "estimate", _PARAMETERS, _storage),
    Seam(EmbeddingPerfEstimator, "estimate", _PARAMETERS, _perf),
)
