"""What a planner chooses from: its options, and proposals made of them.

It is to go on to the next proposal where sharding would refuse one. What is wrong with such a
proposal is a matter of several tables, see ``plan.mean_problems``, so that no option of a single
table can be left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from torchrec_ext.distributed import column_shards, plan
from torchrec_ext.distributed.estimates import states_by_option
from torchrec_ext.distributed.patching import Function, Seam

# An attribute of options of ours whose sharding type the planner chooses; copies have it too.
_IS_FREE = "_torchrec_ext_is_free"


def mark(enumerator: EmbeddingEnumerator, options: Sequence[ShardingOption]) -> None:
    """Marks options of pooled tables of ours that no constraint gives a sharding type.

    Args:
        enumerator: TorchRec's, which knows the constraints.
        options: Its options.
    """
    states = states_by_option(options, enumerator._sharder_data_map)
    for option, ours in zip(options, states, strict=True):
        constraint = (enumerator._constraints or {}).get(option.name)
        is_free = constraint is None or not constraint.sharding_types
        if ours is not None and is_free and option.is_pooled:
            vars(option)[_IS_FREE] = True


def check(proposal: Iterable[ShardingOption]) -> None:
    """Checks a proposal in which the planner has a choice.

    Raises:
        PlannerError: Sharding would refuse it.
    """
    by_module: dict[str, list[ShardingOption]] = {}
    for option in proposal:
        by_module.setdefault(option.module[0], []).append(option)
    for options in by_module.values():
        if not any(_IS_FREE in vars(option) for option in options):
            continue
        configs = _configs(options[0].module[1])
        tables = [(configs[o.name], o.sharding_type) for o in options if o.name in configs]
        problem = next(plan.mean_problems(tables), None)
        if problem is not None:
            raise PlannerError(error_type=PlannerErrorType.PARTITION, message=problem)


def _configs(module: Any) -> dict[str, Any]:
    collections = (m for m in module.modules() if isinstance(m, EmbeddingBagCollectionInterface))
    return {table.name: table for each in collections for table in each.embedding_bag_configs()}


def _options(original: Function) -> Function:
    @functools.wraps(original)
    def populate_estimates(self: Any, sharding_options: Any) -> None:
        column_shards.cut(self, sharding_options)
        mark(self, sharding_options)
        original(self, sharding_options)

    return populate_estimates


def _checked(original: Function) -> Function:
    @functools.wraps(original)
    def partition(
        self: Any, proposal: Any, storage_constraint: Any, hbm_per_device: Any = None
    ) -> Any:
        check(proposal)
        return original(self, proposal, storage_constraint, hbm_per_device)

    return partition


SEAMS = (
    Seam(EmbeddingEnumerator, "populate_estimates", ("self", "sharding_options"), _options),
    Seam(
        GreedyPerfPartitioner,
        "partition",
        ("self", "proposal", "storage_constraint", "hbm_per_device"),
        _checked,
    ),
)
