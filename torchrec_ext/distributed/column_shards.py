"""Column shards of tables whose dim is no multiple of 4.

TorchRec's planner cuts a table into shards of equal width, the least divisor of its dim that is a
multiple of 4 and at least ``min_partition``, and leaves a table whole that has none. Our module
takes every width, so tables whose dim is none are cut by the same rule without that condition.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torchrec.distributed.planner.constants import MIN_CW_DIM
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ShardingType

from torchrec_ext.any_width import FBGEMM_WIDTH
from torchrec_ext.distributed.estimates import states_by_option

COLUMN_SHARDING_TYPES = (
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.GRID_SHARD.value,
)


def cut(enumerator: EmbeddingEnumerator, options: Iterable[ShardingOption]) -> None:
    """Cuts options that TorchRec left whole because of their width.

    Args:
        enumerator: TorchRec's enumerator, which knows the constraints and the topology.
        options: Its options; ``shards`` of those that column shards suit are replaced, without a
            rank and without estimates.
    """
    odd = [option for option in options if _is_whole_and_odd(option)]
    states = states_by_option(odd, enumerator._sharder_data_map)
    for option, ours in zip(odd, states, strict=True):
        if ours is not None:
            option.shards = _shards(enumerator, option)


def _is_whole_and_odd(option: ShardingOption) -> bool:
    dim = option.tensor.shape[1]
    return (
        option.sharding_type in COLUMN_SHARDING_TYPES
        and dim % FBGEMM_WIDTH != 0
        and all(shard.size[1] == dim and shard.rank is None for shard in option.shards)
    )


def _shards(enumerator: EmbeddingEnumerator, option: ShardingOption) -> list[Shard]:
    """What TorchRec's own arithmetic makes of a table four times as wide, in quarters."""
    rows, dim = option.tensor.shape
    constraints = (enumerator._constraints or {}).get(option.name)
    least = (constraints.min_partition if constraints else None) or MIN_CW_DIM
    sizes, offsets = calculate_shard_sizes_and_offsets(
        tensor=torch.empty(rows, FBGEMM_WIDTH * dim, device="meta"),
        world_size=enumerator._world_size,
        local_world_size=enumerator._local_world_size,
        sharding_type=option.sharding_type,
        col_wise_shard_dim=FBGEMM_WIDTH * least,
    )
    return [
        Shard(
            size=[size[0], size[1] // FBGEMM_WIDTH], offset=[offset[0], offset[1] // FBGEMM_WIDTH]
        )
        for size, offset in zip(sizes, offsets, strict=True)
    ]
