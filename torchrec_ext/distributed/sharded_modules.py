"""Finds tables with our optimizers in sharded modules."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.fused import FusedOptimizerModule

from torchrec_ext.distributed.fused_optimizer import FusedOptimizer, ours_in
from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.optim_type import OptimType


def optimizers_of(model: torch.nn.Module) -> Iterator[FusedOptimizer]:
    """Our fused optimizers in a model, of this rank's tables; each once."""
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FusedOptimizerModule):
            continue
        for part in ours_in(module.fused_optimizer):
            if id(part) not in seen:
                seen.add(id(part))
                yield part


def tables_of(model: torch.nn.Module) -> list[str]:
    """The names of a model's sharded tables with our optimizers, on any rank."""
    names = {config.name for part in optimizers_of(model) for config in part.tables}
    for module in model.modules():
        for groups in (g for each in _shardings(module) for g in _groups_by_rank(each)):
            for group in groups:
                if isinstance((group.fused_params or {}).get("optimizer"), OptimType):
                    names.update(config.name for config in group.embedding_tables)
    return sorted(names)


def check_quantized_modules(model: torch.nn.Module, types: Iterable[Any]) -> None:
    """Checks a model whose modules of these types are to be replaced by quantised ones.

    Raises:
        ValueError: TorchRec's collections are to be, but in the model they are sharded, so that it
            would be left as it is; names the tables with our optimizers.
    """
    collections = (EmbeddingBagCollection, EmbeddingCollection)
    if not any(isinstance(each, type) and issubclass(each, collections) for each in types):
        return
    tables = tables_of(model)
    if tables:
        raise ValueError(
            f"tables {tables} are sharded: quantize_embeddings replaces unsharded collections and "
            "would leave these as they are; load torchrec_ext.inference.gather_weights(model) into "
            "an unsharded model and quantise that"
        )


def _shardings(module: torch.nn.Module) -> list[Any]:
    """TorchRec's shardings: a list in bags' collections, a dict in the others."""
    by_type = getattr(module, "_sharding_type_to_sharding", {})
    return [*getattr(module, "_embedding_shardings", []), *by_type.values()]


def _groups_by_rank(sharding: Any) -> list[Any]:
    return getattr(sharding, "_grouped_embedding_configs_per_rank", [])


def _checked(original: Function) -> Function:
    @functools.wraps(original)
    def quantize_dynamic(
        model: Any, qconfig_spec: Any = None, *arguments: Any, **keywords: Any
    ) -> Any:
        check_quantized_modules(model, qconfig_spec or ())
        return original(model, qconfig_spec, *arguments, **keywords)

    return quantize_dynamic


SEAMS = (
    Seam(
        # What TorchRec's quantize_embeddings calls: that one is often imported before the hook.
        torch.quantization,
        "quantize_dynamic",
        ("model", "qconfig_spec", "dtype", "mapping", "inplace"),
        _checked,
    ),
)
