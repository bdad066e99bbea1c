"""What happened during training, and how it travels through a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrec_ext.train.metrics import Quality
from torchrec_ext.train.tables import ZeroCount


@dataclass(frozen=True)
class Evaluation:
    """The state of the model after some step.

    Attributes:
        step: Steps done.
        quality: Quality on the held-out examples.
        zeros: Exactly-zero weights by table.
    """

    step: int
    quality: Quality
    zeros: dict[str, ZeroCount]


@dataclass(frozen=True)
class CountedZeros:
    """The exactly-zero weights between two evaluations.

    Attributes:
        step: Steps done.
        zeros: Exactly-zero weights by table.
    """

    step: int
    zeros: dict[str, ZeroCount]


@dataclass
class History:
    """What happened during training; equal on every rank.

    Attributes:
        losses: Mean loss over the global batch, per step.
        evaluations: One after every epoch; an interrupted run has none for its last epoch.
        seconds: Time spent in training steps, without evaluations and checkpoints.
        zeros: Exactly-zero weights by table when training ended, also after an interruption.
        counted: What ``train.zeros_every_steps`` asked for.
    """

    losses: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    seconds: float = 0.0
    zeros: dict[str, ZeroCount] = field(default_factory=dict)
    counted: list[CountedZeros] = field(default_factory=list)

    def zeros_over_steps(self) -> list[CountedZeros]:
        """Give every count of zeros, those of evaluations too, by step; one for a step."""
        both: list[CountedZeros | Evaluation] = [*self.counted, *self.evaluations]
        counts = {each.step: each.zeros for each in both}
        return [CountedZeros(step, counts[step]) for step in sorted(counts)]

    def to_json(self) -> dict[str, Any]:
        """Give the content as JSON's types; ``from_json`` gets every bit of it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> History:
        """Read what ``to_json`` gave.

        Raises:
            KeyError, TypeError, AttributeError: If it is something else.
        """
        return cls(
            losses=[float(loss) for loss in content["losses"]],
            evaluations=[
                Evaluation(each["step"], Quality(**each["quality"]), _zeros(each["zeros"]))
                for each in content["evaluations"]
            ],
            seconds=content["seconds"],
            zeros=_zeros(content["zeros"]),
            # Checkpoints of the first version have none.
            counted=[
                CountedZeros(each["step"], _zeros(each["zeros"]))
                for each in content.get("counted", [])
            ],
        )


def _zeros(content: Mapping[str, Any]) -> dict[str, ZeroCount]:
    return {table: ZeroCount(**count) for table, count in content.items()}
