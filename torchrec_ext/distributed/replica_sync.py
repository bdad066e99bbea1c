"""2D parallelism: what ``DMPCollection.sync()`` does for tables with our optimizers.

Under ``DMPCollection`` replicas of the tables train apart, each on batches of its own. ``sync()``
makes them equal again: weights and **all** states become their arithmetic means over the replicas,
element by element, in the tensors' own dtype and with TorchRec's collective. TorchRec itself knows
one state, called ``sum``.

- The mean of sums of squares (``sum``, ``accum``, ``exp_avg_sq``) and of momenta is that of a run
  whose gradients were shared out: n replicas count an update of one of them as 1/n. So do the
  updates of a row that ``bias_correction="per_row"`` counts: means need not be integers.
- FTRL's weights are a function of its states, and the next update of a row computes them anew. So
  the states are averaged and the weight is derived from them, by an update with a gradient of zero:
  weight and states agree as after any other update, under the current hyperparameters. A row that
  is the same on all replicas, such as one that no batch looked up since the last ``sync()``, keeps
  its weight, also an initial one that its states do not give.
- Rows that sleep (``sparse_mode="dense"``) are brought up to date first.
- The step clock and the hyperparameters must agree. They do where every rank makes the same number
  of updates and runs the same schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DMPCollection

from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.distributed.plan import PlanError
from torchrec_ext.optim_type import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags
from torchrec_ext.weights_of_states import write_weights_of_states

# Temporary memory: 8 bytes an element of these rows, and about 40 bytes a row of those.
_CHECKSUM_ROWS = 1 << 14
_DERIVED_ROWS = 1 << 20


def cache_tensors(original: Callable[..., None], collection: Any, contexts: Sequence[Any]) -> None:
    """Lists the tensors that TorchRec averages: for our modules, weights and all states.

    Args:
        original: TorchRec's ``_cache_sync_tensors``, which lists those of the other modules.
        collection: The ``DMPCollection``.
        contexts: One for each sharding plan in it.

    Raises:
        PlanError: A managed collision collection has tables of ours with other states than one
            ``sum``, the only one that TorchRec moves when it merges replicas' ids.
    """
    everything = [context.modules_to_sync for context in contexts]
    for context in contexts:
        for module, _ in context.modules_to_sync:
            _check_managed_collision(module)
    for context, pairs in zip(contexts, everything, strict=True):
        context.modules_to_sync = [pair for pair in pairs if not _is_ours(pair[0])]
    try:
        original(collection, contexts)
    finally:
        for context, pairs in zip(contexts, everything, strict=True):
            context.modules_to_sync = pairs
    for context in contexts:
        for module in _modules(context):
            for weight in module.split_embedding_weights():
                context.weights_by_dtype.setdefault(weight.dtype, []).append(weight)
            for state in (each for table in module.split_optimizer_states() for each in table):
                context.optimizer_tensors_by_dtype.setdefault(state.dtype, []).append(state)


def sync(original: Callable[..., None], collection: Any, include_optimizer_state: bool) -> None:
    """Makes replicas equal; see the module. A collective call of all ranks.

    Args:
        original: TorchRec's ``sync``, which averages.
        collection: The ``DMPCollection``.
        include_optimizer_state: Whether to average states as well as weights. FTRL needs it.

    Raises:
        ValueError: States are to be left out with FTRL.
        RuntimeError: Step clocks or hyperparameters differ between replicas. Nothing was averaged;
            sleeping rows are up to date.
    """
    found = [(context, _modules(context)) for context in collection._ctxs]
    for _, modules in found:
        _check_included(modules, include_optimizer_state)
    for context, modules in found:
        for module in modules:
            module.pull_learning_rate()
            module.flush()
        _check_agreement(modules, context.replica_pg)
    differing = [_differing_rows(_derived(modules), c.replica_pg) for c, modules in found]
    for (_, modules), rows in zip(found, differing, strict=True):
        for module, rows_by_table in zip(_derived(modules), rows, strict=True):
            _write_seeds(module, rows_by_table)
    original(collection, include_optimizer_state)
    for (_, modules), rows in zip(found, differing, strict=True):
        for module, rows_by_table in zip(_derived(modules), rows, strict=True):
            _derive_weights(module, rows_by_table)
        for module in modules:
            if module.lxu_cache_weights.numel() > 0:  # FBGEMM's cache has the rows as they were
                module.reset_cache_states()


def _is_ours(module: Any) -> bool:
    return isinstance(module, TableBatchedEmbeddingBags)


def _modules(context: Any) -> list[TableBatchedEmbeddingBags]:
    return [module for module, _ in context.modules_to_sync if _is_ours(module)]


def _derived(modules: Iterable[TableBatchedEmbeddingBags]) -> list[TableBatchedEmbeddingBags]:
    """Those whose weights follow from their states."""
    return [module for module in modules if module.optim_type == OptimType.FTRL]


def _check_managed_collision(module: Any) -> None:
    tables = getattr(module, "_table_to_tbe_and_index", {})
    for table, (lookup, _) in tables.items():
        if not _is_ours(lookup):
            continue
        states = [state.name for state in lookup._states]
        if states != ["sum"]:
            raise PlanError(
                f"table {table!r}: 2D parallelism of a managed collision collection does not keep "
                f"the states {states} of OptimType.{lookup.optim_type.name}; use "
                "DistributedModelParallel instead of DMPCollection"
            )


def _check_included(
    modules: Iterable[TableBatchedEmbeddingBags], include_optimizer_state: bool
) -> None:
    if include_optimizer_state:
        return
    for module in _derived(modules):
        raise ValueError(
            f"tables {module.table_labels}: sync(include_optimizer_state=False) would be undone by "
            "the next update, because FTRL computes weights from its states; call sync() instead"
        )


def _check_agreement(
    modules: Sequence[TableBatchedEmbeddingBags], replicas: dist.ProcessGroup
) -> None:
    if not modules:
        return
    names = [("step", *module._spec.kernel_hyperparameters) for module in modules]
    values = [(int(module.iter), *module._kernel_hyperparameters) for module in modules]
    own = torch.tensor([value for each in values for value in each], dtype=torch.float64)
    own = own.to(modules[0].current_device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(replicas))]
    dist.all_gather(gathered, own, group=replicas)
    by_place = iter(torch.stack(gathered).t().tolist())
    for module, module_names in zip(modules, names, strict=True):
        for name in module_names:
            by_replica = next(by_place)
            if name == "step":
                by_replica = [int(value) for value in by_replica]
            if any(value != by_replica[0] for value in by_replica):
                raise RuntimeError(
                    f"tables {module.table_labels}: {name} differs between replicas: {by_replica}; "
                    "every rank has to make the same number of updates with the same "
                    "hyperparameters between two sync(). Nothing was averaged"
                )


def _differing_rows(
    modules: Sequence[TableBatchedEmbeddingBags], replicas: dist.ProcessGroup
) -> list[list[Tensor]]:
    """The rows, ``[module][table]``, whose weights or states are not the same on all replicas."""
    tables = [
        [weight, *states]
        for module in modules
        for weight, states in zip(
            module.split_embedding_weights(), module.split_optimizer_states(), strict=True
        )
    ]
    if not tables:
        return []
    own = torch.cat([_checksums(tensors) for tensors in tables])
    extremes = torch.stack([own, ~own])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=replicas)
    differ = iter((extremes[0] != ~extremes[1]).split([len(tensors[0]) for tensors in tables]))
    return [
        [next(differ).nonzero().squeeze(1) for _ in module.embedding_specs] for module in modules
    ]


def _checksums(tensors: Sequence[Tensor]) -> Tensor:
    """64 bits of each row of tensors that share their rows: int64 ``[rows]``.

    A sum of products with odd factors modulo 2^64: rows that differ in one element never have the
    same, others by a chance of about 2^-64.
    """
    factors = torch.Generator().manual_seed(0)
    sums = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        bits = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        factor = torch.randint(-(2**62), 2**62, (bits.shape[1],), generator=factors) * 2 + 1
        factor = factor.to(bits.device)
        for part, into in zip(bits.split(_CHECKSUM_ROWS), sums.split(_CHECKSUM_ROWS), strict=True):
            into += (part.long() * factor).sum(1)
    return sums


@torch.no_grad()
def _write_seeds(module: TableBatchedEmbeddingBags, rows: Sequence[Tensor]) -> None:
    """Where another replica has updated a row that waits for its first update, begins it here.

    The mark of such rows, with ``preserve_initial_weight``, cannot be averaged with a number.
    """
    if not module.hyperparameters["preserve_initial_weight"]:
        return
    derive = module._spec.derive
    assert derive is not None
    values = {**module.hyperparameters, "preserve_initial_weight": False}
    for weight, states, selected in zip(
        module.split_embedding_weights(), module.split_optimizer_states(), rows, strict=True
    ):
        for part in selected.split(_DERIVED_ROWS):
            linear, accum = (state[part] for state in states)
            seeds = linear.clone()
            derive(weight[part], [seeds, accum], values)
            states[0][part] = torch.where((linear == 0) & linear.signbit(), seeds, linear)


@torch.no_grad()
def _derive_weights(module: TableBatchedEmbeddingBags, rows: Sequence[Tensor]) -> None:
    """Gives rows, ``[table]``, the weights that follow from their states."""
    for weight, states, selected in zip(
        module.split_embedding_weights(), module.split_optimizer_states(), rows, strict=True
    ):
        for part in selected.split(_DERIVED_ROWS):
            write_weights_of_states(module, weight, states, part)


def _cached(original: Function) -> Function:
    @functools.wraps(original)
    def cache_sync_tensors(self: Any, contexts: Any) -> None:
        cache_tensors(original, self, contexts)

    return cache_sync_tensors


def _synced(original: Function) -> Function:
    @functools.wraps(original)
    def wrapped(self: Any, include_optimizer_state: bool = True) -> None:
        sync(original, self, include_optimizer_state)

    return wrapped


SEAMS = (
    Seam(DMPCollection, "_cache_sync_tensors", ("self", "contexts"), _cached),
    Seam(DMPCollection, "sync", ("self", "include_optimizer_state"), _synced),
)
