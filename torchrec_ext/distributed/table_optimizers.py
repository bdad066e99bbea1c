"""Which optimizer each table gets, and with which hyperparameters.

TorchRec merges a sharder's ``fused_params`` with the class and keywords that were applied to a
table's parameter. It knows only its own classes and FBGEMM's names, and it writes into the dicts it
is given; the functions here show it our classes as ready ``fused_params``, one copy per parameter,
and clear up what the merge leaves behind.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.embedding_sharding import USE_ONE_TBE_PER_TABLE, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fused_params import FUSED_PARAM_SSD_TABLE_LIST

from torchrec_ext.optim import FusedOptimizer
from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import SPECS, HyperparameterError, OptimizerSpec, State, spec_of
from torchrec_ext.tbe_arguments import (
    FBGEMM_KEYWORDS,
    FBGEMM_OPTIMIZER_KEYWORDS,
    check_own_keywords,
    check_types,
    max_gradient_of,
    split_keywords,
)

# Keywords of FBGEMM's module that the kernels set.
CONFIGURED_KEYWORDS = frozenset(
    {
        "device",
        "embedding_shard_info",
        "embedding_specs",
        "feature_table_map",
        "pooling_mode",
        "table_names",
        "weights_precision",
    }
)
# Neither hyperparameters nor keywords of FBGEMM's module: keywords of ours, and keys that TorchRec
# takes out of ``fused_params`` before a module sees them.
OWN_KEYWORDS = frozenset({"rounding_seed", "drop_bad_indices"})
KEPT_KEYS = frozenset(
    {"optimizer", *OWN_KEYWORDS, "_batch_key", USE_ONE_TBE_PER_TABLE, FUSED_PARAM_SSD_TABLE_LIST}
    | {
        value
        for name, value in vars(batched_embedding_kernel).items()
        if name.endswith("_STR") and isinstance(value, str)
    }
)


def applied_optimizer(parameter: Any, table: str) -> FusedOptimizer | None:
    """The optimizer of ours that ``apply_optimizer_in_backward`` left on a parameter, if any.

    Raises:
        ValueError: The table has more than one optimizer, and one of them is ours.
    """
    classes = [cls for cls in getattr(parameter, "_optimizer_classes", ()) if cls is not None]
    if not any(issubclass(cls, FusedOptimizer) for cls in classes):
        return None
    if len(classes) > 1:
        names = [cls.__name__ for cls in classes]
        raise ValueError(
            f"table {table!r}: {len(classes)} optimizers were applied to it ({', '.join(names)}); "
            "a table is trained by one, apply one"
        )
    instances = getattr(parameter, "_in_backward_optimizers", None)
    if instances:
        return instances[0]
    return classes[0]([parameter], **parameter._optimizer_kwargs[0])


@contextlib.contextmanager
def shown_to_torchrec(module: torch.nn.Module) -> Iterator[None]:
    """While open, tables with a class of ours look to TorchRec like tables with ``fused_params``.

    Raises:
        ValueError: A table has more than one optimizer, and one of them is ours.
    """
    shown: list[tuple[Any, dict[str, Any]]] = []
    for name, parameter in module.named_parameters():
        optimizer = applied_optimizer(parameter, name.removesuffix(".weight").split(".")[-1])
        if optimizer is not None:
            shown.append((parameter, optimizer.fused_params()))
    before = [
        (parameter, parameter._optimizer_classes, parameter._optimizer_kwargs)
        for parameter, _ in shown
    ]
    try:
        for parameter, fused_params in shown:
            parameter._optimizer_classes = [None]
            parameter._optimizer_kwargs = [fused_params]
        yield
    finally:
        for parameter, classes, keywords in before:
            parameter._optimizer_classes = classes
            parameter._optimizer_kwargs = keywords


def check_shared(fused_params: Mapping[str, Any]) -> None:
    """Checks the ``optimizer`` of a sharder's ``fused_params``.

    Raises:
        TypeError: It is neither an ``OptimType`` nor an ``EmbOptimType``, or is missing beside
            hyperparameters that FBGEMM does not have.
    """
    optimizer = fused_params.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, OptimType | EmbOptimType):
        raise TypeError(
            f"fused_params: optimizer={optimizer!r} is neither a torchrec_ext.OptimType nor "
            "FBGEMM's EmbOptimType; give e.g. OptimType.FTRL (classes such as "
            "torchrec_ext.optim.FTRL are for _apply_optimizer_in_backward)"
        )
    names = {name for spec in SPECS.values() for name in spec.keywords}
    ours = sorted(fused_params.keys() & (names - FBGEMM_KEYWORDS - FBGEMM_OPTIMIZER_KEYWORDS))
    if optimizer is None and ours:
        raise TypeError(
            f"fused_params: {', '.join(ours)} without an optimizer would be dropped; add "
            '"optimizer": OptimType.FTRL, or whichever they belong to'
        )


def settle(infos: Iterable[EmbeddingShardingInfo], shared: Mapping[str, Any] | None) -> None:
    """Settles each table's merged ``fused_params``: one optimizer, only its hyperparameters, all.

    A table with an optimizer of its own does not inherit the hyperparameters of the sharder's.

    Args:
        infos: TorchRec's description of the tables; ``fused_params`` of a table with one of our
            optimizers are replaced.
        shared: The sharder's ``fused_params``.

    Raises:
        HyperparameterError: Names the tables, the hyperparameter, its value and the legal range; or
            the tables that have no optimizer beside one of ours.
    """
    infos = list(infos)
    settled: list[tuple[EmbeddingShardingInfo, dict[str, Any]]] = []
    tables_by_error: dict[str, list[str]] = {}
    for info in infos:
        _warn_of_decoupled_decay(info)
        try:
            settled.append((info, _settled(info, shared or {})))
        except HyperparameterError as error:
            tables_by_error.setdefault(str(error), []).append(info.embedding_config.name)
    if tables_by_error:
        raise HyperparameterError(
            "\n".join(f"{named(tables)}: {error}" for error, tables in tables_by_error.items())
        )
    _check_nobody_is_left_out(settled)
    for info, fused_params in settled:
        info.fused_params = fused_params


def _check_nobody_is_left_out(
    settled: Sequence[tuple[EmbeddingShardingInfo, Mapping[str, Any]]],
) -> None:
    """FBGEMM would train a table that has no optimizer with SGD and a learning rate of .01."""
    without = [
        info.embedding_config.name
        for info, fused_params in settled
        if fused_params.get("optimizer") is None
        and info.param_sharding.compute_kernel != EmbeddingComputeKernel.DENSE.value
    ]
    if without and any(isinstance(given.get("optimizer"), OptimType) for _, given in settled):
        raise HyperparameterError(
            f"{named(without)}: no optimizer, beside tables that have one of torchrec_ext; apply "
            "one with _apply_optimizer_in_backward, or give the sharder fused_params for the rest"
        )


def named(tables: list[str]) -> str:
    """Tables as the subject of an error message."""
    return f"table {tables[0]!r}" if len(tables) == 1 else f"tables {tables}"


def _warn_of_decoupled_decay(info: EmbeddingShardingInfo) -> None:
    """TorchRec gives torch.optim.Adam FBGEMM's ADAM, which has no other weight decay."""
    classes = getattr(info.param, "_optimizer_classes", ())
    if list(classes) != [torch.optim.Adam]:
        return
    decay = info.param._optimizer_kwargs[0].get("weight_decay", 0.0)
    if decay:
        warnings.warn(
            f"table {info.embedding_config.name!r}: torch.optim.Adam with weight_decay={decay!r} "
            "becomes FBGEMM's ADAM, which decouples the decay as AdamW does; apply "
            "torchrec_ext.optim.Adam for torch's coupled decay (L2), or torchrec_ext.optim.AdamW",
            stacklevel=2,
        )


def _settled(info: EmbeddingShardingInfo, shared: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(info.fused_params or {})
    own = applied_optimizer(info.param, info.embedding_config.name)
    if own is not None:
        fused_params = own.fused_params()
        merged = _without_inherited(merged, shared, fused_params) | fused_params
    optimizer = merged.get("optimizer")
    if not isinstance(optimizer, OptimType):
        if isinstance(shared.get("optimizer"), OptimType):
            # A class of torch or TorchRec: FBGEMM's constructor would stumble over names of ours.
            keywords = getattr(info.param, "_optimizer_kwargs", [{}])[0]
            merged = _without_inherited(merged, shared, keywords)
        _check_no_own_keywords(merged)
        return merged
    return _resolved(spec_of(optimizer), merged)


def _check_no_own_keywords(merged: Mapping[str, Any]) -> None:
    """FBGEMM's constructor would say no more than that it got an unexpected keyword."""
    for name in sorted(merged.keys() & OWN_KEYWORDS):
        raise HyperparameterError(
            f"{name}={merged[name]!r} is a keyword of torchrec_ext, but the table's optimizer is "
            f"{merged.get('optimizer')!r}; give it an OptimType or a class of torchrec_ext.optim, "
            f"or leave {name} out"
        )


def _resolved(spec: OptimizerSpec, merged: Mapping[str, Any]) -> dict[str, Any]:
    """``fused_params`` with every hyperparameter of the optimizer, checked."""
    for name in sorted(merged.keys() & CONFIGURED_KEYWORDS):
        raise HyperparameterError(
            f"{name}={merged[name]!r} comes from the table's configuration and the plan; leave it "
            "out of fused_params"
        )
    kept = {key: value for key, value in merged.items() if key in KEPT_KEYS}
    others = {key: value for key, value in merged.items() if key not in KEPT_KEYS}
    try:
        module_keywords, hyperparameters = split_keywords(spec, others)
        # The module checks these as well, but only on the ranks that get one.
        max_gradient_of(module_keywords)
        check_types(module_keywords)
        check_own_keywords(kept)
    except (TypeError, ValueError) as error:
        raise HyperparameterError(str(error)) from error
    _check_hashable(kept | module_keywords)
    return kept | module_keywords | spec.resolve(hyperparameters)


def _check_hashable(keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        try:
            hash(value)
        except TypeError as error:
            raise HyperparameterError(
                f"{name}={value!r} is not hashable, and TorchRec groups tables by equal values; "
                "leave it out, or give a value that is (a tuple instead of a list)"
            ) from error


def planned_states(
    parameter: Any, table: str, shared: Mapping[str, Any]
) -> tuple[State, ...] | None:
    """The states that a table will have in memory when it is sharded; None if it is not ours.

    A planner runs on one rank while the others wait for its plan, so nothing is refused here:
    :func:`settle` raises on every rank. Where hyperparameters are not legal, all states count.

    Args:
        parameter: The table's parameter.
        table: Its name.
        shared: The ``fused_params`` of the module's sharder.
    """
    classes = [cls for cls in getattr(parameter, "_optimizer_classes", ()) if cls is not None]
    if len(classes) > 1:
        return None
    merged = dict(shared)
    own = applied_optimizer(parameter, table)
    if own is not None:
        merged = own.fused_params()
    elif classes:
        # TorchRec translates the class to FBGEMM's optimizer, unless the keywords name one.
        keywords = dict(parameter._optimizer_kwargs[0])
        merged |= {"optimizer": classes[0]} | keywords
        if "lr" in keywords:
            merged["learning_rate"] = merged.pop("lr")
    if not isinstance(merged.get("optimizer"), OptimType):
        return None
    spec = spec_of(merged["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settle() warns, once
        try:
            return spec.states_in_memory(_resolved(spec, merged))
        except HyperparameterError:
            return spec.states


def _without_inherited(
    merged: Mapping[str, Any], shared: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Merged ``fused_params`` less the hyperparameters that come from the sharder alone."""
    optimizer = shared.get("optimizer")
    names = set(FBGEMM_OPTIMIZER_KEYWORDS)
    if isinstance(optimizer, OptimType):
        names |= spec_of(optimizer).keywords.keys()
    return {key: value for key, value in merged.items() if key in own or key not in names}
