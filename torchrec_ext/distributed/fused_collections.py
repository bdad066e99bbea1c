"""``FusedEmbeddingBagCollection`` with the classes of ``torchrec_ext.optim`` as optimizer types.

TorchRec translates the class to FBGEMM's name for it, when the module is built and when it is
sharded, and then builds FBGEMM's module, or the sharded one's kernels, which the hook knows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torchrec.distributed import fused_embedding, fused_embeddingbag
from torchrec.modules import fused_embedding_modules
from torchrec.modules.embedding_configs import (
    data_type_to_sparse_type,
    pooling_type_to_pooling_mode,
)
from torchrec.modules.fused_embedding_modules import (
    EmbeddingFusedOptimizer,
    _BatchedFusedEmbeddingLookups,
)

from torchrec_ext.distributed.patching import Function, Seam
from torchrec_ext.distributed.table_optimizers import KEPT_KEYS
from torchrec_ext.optim import FusedOptimizer
from torchrec_ext.optim_type import OptimType
from torchrec_ext.tbe import TableBatchedEmbeddingBags
from torchrec_ext.tbe_arguments import FBGEMM_KEYWORDS


class CollectionOptimizer(EmbeddingFusedOptimizer):
    """The fused optimizer of one module of an unsharded collection.

    States have TorchRec's keys: ``<table>.weight.momentum_1``, ``momentum_2``; one more has its own
    name, and the clock, where the update depends on it, is ``<table>.weight.step``.
    """

    def __init__(self, tables: Sequence[Any], module: TableBatchedEmbeddingBags) -> None:
        """Reads the module's states.

        Args:
            tables: TorchRec's configuration of each table.
            module: The tables' module.
        """
        self.module = module
        super().__init__(list(tables), module)
        for (name, weight), states in zip(
            self.params.items(), module.get_optimizer_state(), strict=True
        ):
            for state, value in list(states.items())[2:]:
                self._state[weight][f"{name}.{state}"] = value
            if module.saves_step:
                self._state[weight][f"{name}.step"] = module.iter
        module.follow_learning_rate(self)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The states by parameter, every row up to date."""
        self.module.flush()
        return self._state

    @state.setter
    def state(self, state: dict[Any, dict[str, Any]]) -> None:
        self._state = state

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Hands on the learning rate, as TorchRec does."""
        super().zero_grad(set_to_none)
        self.module.follow_learning_rate(self)  # what was handed on counts as seen

    def step(self, closure: Any = None) -> None:
        """Hands on the learning rate, as TorchRec does."""
        super().step(closure)
        self.module.follow_learning_rate(self)


def _convert(original: Function) -> Function:
    @functools.wraps(original)
    def convert(optimizer_type: type, optimizer_kwargs: dict[str, Any]) -> Any:
        if not (isinstance(optimizer_type, type) and issubclass(optimizer_type, FusedOptimizer)):
            return original(optimizer_type, optimizer_kwargs)
        for_module = (KEPT_KEYS | FBGEMM_KEYWORDS) - {"optimizer"}
        hyperparameters = {k: v for k, v in optimizer_kwargs.items() if k not in for_module}
        parameter = torch.nn.Parameter(torch.empty(0))
        fused_params = optimizer_type([parameter], **hyperparameters).fused_params()
        optimizer = fused_params.pop("optimizer")
        kept = {k: v for k, v in optimizer_kwargs.items() if k in for_module}
        return optimizer, fused_params | kept

    return convert


def _lookups(original: Function) -> Function:
    @functools.wraps(original)
    def create(
        self: Any,
        embedding_tables: Sequence[Any],
        data_type: Any,
        pooling: Any,
        optimizer_type: Any,
        optimizer_kwargs: dict[str, Any],
        device: torch.device,
        embedding_location: Any,
    ) -> None:
        tables = embedding_tables
        if not isinstance(optimizer_type, OptimType):
            original(
                self,
                tables,
                data_type,
                pooling,
                optimizer_type,
                optimizer_kwargs,
                device,
                embedding_location,
            )
            return
        torch.nn.Module.__init__(self)
        self._embedding_tables = tables
        self._rows = self._num_embeddings = [table.num_embeddings for table in tables]
        self._cols = [table.embedding_dim for table in tables]
        self._weight_init_mins = [table.get_weight_init_min() for table in tables]
        self._weight_init_maxs = [table.get_weight_init_max() for table in tables]
        self._feature_table_map = [
            number for number, table in enumerate(tables) for _ in range(table.num_features())
        ]
        on = ComputeDevice.CUDA if device.type == "cuda" else ComputeDevice.CPU
        self._emb_module = TableBatchedEmbeddingBags(
            [(t.num_embeddings, t.embedding_dim, embedding_location, on) for t in tables],
            self._feature_table_map,
            optimizer=optimizer_type,
            pooling_mode=pooling_type_to_pooling_mode(pooling),
            weights_precision=data_type_to_sparse_type(data_type),
            device=device,
            table_names=[table.name for table in tables],
            **optimizer_kwargs,
        )
        self._optim = CollectionOptimizer(tables, self._emb_module)
        self._init_parameters()

    return create


_CONVERT = "convert_optimizer_type_and_kwargs"
SEAMS = (
    *(
        Seam(module, _CONVERT, ("optimizer_type", "optimizer_kwargs"), _convert)
        for module in (fused_embedding_modules, fused_embeddingbag, fused_embedding)
    ),
    Seam(
        _BatchedFusedEmbeddingLookups,
        "__init__",
        (
            "self",
            "embedding_tables",
            "data_type",
            "pooling",
            "optimizer_type",
            "optimizer_kwargs",
            "device",
            "embedding_location",
        ),
        _lookups,
    ),
)
