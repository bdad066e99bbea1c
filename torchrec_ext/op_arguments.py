"""What the ops need to know of a batch and of a device, beyond tables and lookups."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VariableBatch:
    """A batch whose features have different batch sizes; ``grad_output`` is then flat.

    Attributes:
        feature_bags: int64 ``[features + 1]``, where each feature's bags begin, and their end.
        gradient_offsets: int64 ``[bags]``, where each bag's output gradient begins in
            ``grad_output``.
    """

    feature_bags: Tensor
    gradient_offsets: Tensor


@dataclass(frozen=True)
class DeviceTables:
    """What kernels on a device need to know of the tables, in its memory.

    Attributes:
        layout: :func:`device_layout`'s, on the device.
        managed_weights: The weights of tables in managed memory, flat; offsets in ``table_layout``
            count through ``weights`` and then through these.
        managed_states: The same for each state.
        cache_weights: ``[slots, columns]``, cached rows of ``managed_weights``.
        cache_locations: int32 ``[lookups]``, the slot of each lookup's row, or -1.
    """

    layout: Tensor
    managed_weights: Tensor | None = None
    managed_states: Sequence[Tensor] | None = None
    cache_weights: Tensor | None = None
    cache_locations: Tensor | None = None


def device_layout(
    table_layout: Tensor, feature_table_map: Tensor, device: torch.device
) -> DeviceTables:
    """Puts a layout onto a device, once for all steps.

    Args:
        table_layout: As in :func:`~torchrec_ext.ops.fused_update`, on the CPU.
        feature_table_map: As in :func:`~torchrec_ext.ops.fused_update`, on the CPU.
        device: Where the weights are.
    """
    layout = torch.ops.torchrec_ext.device_layout(table_layout, feature_table_map)
    return DeviceTables(layout.to(device))


def step_scalars(
    hyperparameters: Sequence[float], completed_updates: int, device: torch.device
) -> Tensor:
    """What changes from step to step, as kernels on a device read it.

    Args:
        hyperparameters: As in :func:`~torchrec_ext.ops.fused_update`.
        completed_updates: The updates so far.
        device: Where the weights are.

    Returns:
        int64 ``[1 + hyperparameters]``: the updates, then the hyperparameters as the bits of
        float64. A captured graph follows what is written here before a replay.
    """
    bits = [struct.unpack("<q", struct.pack("<d", value))[0] for value in hyperparameters]
    return torch.tensor([completed_updates, *bits], dtype=torch.int64, device="cpu").to(device)
