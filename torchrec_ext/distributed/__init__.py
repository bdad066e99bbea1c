"""TorchRec integration: the hook, our kernels, sharders that honour the optimizer, plan checks."""

from torchrec_ext.distributed.async_checkpoint import async_save
from torchrec_ext.distributed.fused_optimizer import derive_optimizer_states, state_step
from torchrec_ext.distributed.hook import install, uninstall
from torchrec_ext.distributed.patching import UnsupportedTorchRecError
from torchrec_ext.distributed.plan import PlanError
from torchrec_ext.distributed.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
)

__all__ = [
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "PlanError",
    "UnsupportedTorchRecError",
    "async_save",
    "derive_optimizer_states",
    "install",
    "state_step",
    "uninstall",
]
