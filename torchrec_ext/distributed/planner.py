"""TorchRec's planner, with the optimizers' memory and traffic counted.

``torchrec_ext.install()`` makes TorchRec's own classes count them; the classes here see to it that
this is so when they work. The planner also says what its plan takes in memory::

    from torchrec_ext.distributed.planner import EmbeddingShardingPlanner, plan_table

    planner = EmbeddingShardingPlanner(topology=topology)
    plan = planner.plan(model, sharders)
    print(plan_table(planner.memory))
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import planners, shard_estimators
from torchrec.distributed.planner.types import SharderData, ShardingOption
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_ext.distributed import hook
from torchrec_ext.distributed.plan_memory import (
    ShardMemory,
    plan_memory,
    plan_table,
    rank_totals,
)

__all__ = [
    "EmbeddingShardingPlanner",
    "EmbeddingStorageEstimator",
    "ShardMemory",
    "plan_table",
    "rank_totals",
]

PlanCallback = Callable[[list[ShardingOption]], list[ShardingOption]]


class EmbeddingStorageEstimator(shard_estimators.EmbeddingStorageEstimator):
    """TorchRec's estimator of memory, for an enumerator of your own.

    The states of a table with an optimizer of this package count as they are allocated: those its
    hyperparameters ask for, float32 whatever the weights are, one of each per shard, where FBGEMM
    places them. Other tables count as TorchRec counts them.

    Example:
        >>> from torchrec.distributed.planner import Topology
        >>> from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
        >>> topology = Topology(world_size=2, compute_device="cpu")
        >>> estimator = EmbeddingStorageEstimator(topology=topology)
        >>> enumerator = EmbeddingEnumerator(topology, batch_size=512, estimator=[estimator])

    Args:
        topology: The devices.
        constraints: Constraints by table name.
        **keywords: TorchRec's other keywords.
    """

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: dict[str, SharderData]
    ) -> None:
        """Sets the ``storage`` of every shard; see TorchRec's method."""
        hook.install()
        super().estimate(sharding_options, sharder_data_map)


class EmbeddingShardingPlanner(planners.EmbeddingShardingPlanner):
    """TorchRec's planner, with the states of this package's optimizers counted.

    They count in the memory of a shard, so that a plan that does not fit is refused with TorchRec's
    ``PlannerError``, and in the time of the backward pass, which reads and writes them.

    Example:
        >>> import torch
        >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from torchrec.distributed.planner import ParameterConstraints, Topology
        >>> from torchrec_ext import OptimType
        >>> from torchrec_ext.distributed import EmbeddingBagCollectionSharder
        >>> tables = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(
        ...         name="item", num_embeddings=1000, embedding_dim=64, feature_names=["item"])],
        ...     device=torch.device("meta"),
        ... )
        >>> planner = EmbeddingShardingPlanner(
        ...     topology=Topology(world_size=1, compute_device="cpu"),
        ...     constraints={"item": ParameterConstraints(sharding_types=["table_wise"])},
        ...     debug=False,
        ... )
        >>> plan = planner.plan(
        ...     tables, [EmbeddingBagCollectionSharder({"optimizer": OptimType.FTRL})]
        ... )
        >>> [(shard.weights, dict(shard.states)) for shard in planner.memory]
        [(256000, {'linear': 256000, 'accum': 256000})]

    Args:
        *arguments: TorchRec's.
        callbacks: TorchRec's.
        **keywords: TorchRec's.
    """

    def __init__(
        self, *arguments: Any, callbacks: Sequence[PlanCallback] | None = None, **keywords: Any
    ) -> None:
        super().__init__(*arguments, callbacks=[*(callbacks or ()), self._remember], **keywords)
        self._chosen: list[ShardingOption] = []
        self._memory: tuple[ShardMemory, ...] | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Makes the plan; see TorchRec's method.

        Raises:
            PlannerError: The tables do not fit with their optimizers' states.
            RuntimeError: From TorchRec: constraints leave no option for a table.
        """
        hook.install()
        self._chosen, self._memory = [], None
        plan = super().plan(module, sharders)
        self._memory = plan_memory(
            self._chosen,
            self._enumerator,
            build_sharder_data_map({sharder_name(s.module_type): s for s in sharders}),
            self._topology.compute_device,
        )
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Makes the plan on rank 0 and gives it to every rank; see TorchRec's method.

        Raises:
            PlannerError, RuntimeError: See :meth:`plan`. Every rank raises what rank 0 raised; with
                TorchRec's planner the others wait for a plan that does not come.
        """
        group = pg or dist.group.WORLD
        assert group is not None, "call torch.distributed.init_process_group() first"
        outcome: list[Any] = [None]
        if sharders is None:
            sharders = get_default_sharders()
        if group.rank() == 0:
            try:
                outcome[0] = self.plan(module, sharders)
            except Exception as error:  # noqa: BLE001  (every rank raises it)
                if group.size() == 1:
                    raise
                outcome[0] = _picklable(error)
        if group.size() > 1:
            dist.broadcast_object_list(outcome, group=group, group_src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    @property
    def memory(self) -> tuple[ShardMemory, ...]:
        """The memory of every shard of the last plan.

        Raises:
            RuntimeError: There is none. ``collective_plan`` plans on rank 0: only there it is
                known.
        """
        if self._memory is None:
            raise RuntimeError(
                "this planner has made no plan; call plan(), or read memory on rank 0, where "
                "collective_plan() makes it"
            )
        return self._memory

    def _remember(self, options: list[ShardingOption]) -> list[ShardingOption]:
        self._chosen = options
        return options


def _picklable(error: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (an exception that cannot travel travels as text)
        return RuntimeError(f"{type(error).__name__}: {error}")
