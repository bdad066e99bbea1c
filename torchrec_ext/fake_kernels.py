"""Shapes of the ops' results, for torch.compile and FakeTensorMode."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_ext._C import device_layout_sizes


@torch.library.register_fake("torchrec_ext::fused_update")
def _fused_update_fake(grad_output: Tensor, *_: object, **__: object) -> None:
    return None


@torch.library.register_fake("torchrec_ext::per_sample_weight_grad")
def _per_sample_weight_grad_fake(
    grad_output: Tensor,
    weights: Tensor,
    table_layout: Tensor,
    feature_table_map: Tensor,
    indices: Tensor,
    *_: object,
    **__: object,
) -> Tensor:
    return grad_output.new_empty(indices.numel(), dtype=torch.float32)


@torch.library.register_fake("torchrec_ext::lookup")
def _lookup_fake(output: Tensor, *_: object, **__: object) -> None:
    return None


@torch.library.register_fake("torchrec_ext::device_layout")
def _device_layout_fake(table_layout: Tensor, feature_table_map: Tensor) -> Tensor:
    of_table, of_feature = device_layout_sizes
    return table_layout.new_empty(
        of_table * table_layout.shape[0] + of_feature * feature_table_map.shape[0]
    )


@torch.library.register_fake("torchrec_ext::sort_lookups")
def _sort_lookups_fake(
    table_layout: Tensor, feature_table_map: Tensor, indices: Tensor, *_: object, **__: object
) -> list[Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return [
        indices.new_empty(rows, dtype=torch.int64),
        indices.new_empty(rows + 1, dtype=torch.int32),
        indices.new_empty(indices.numel(), dtype=torch.int32),
    ]


@torch.library.register_fake("torchrec_ext::catch_up")
def _catch_up_fake(weights: Tensor, *_: object) -> None:
    return None
