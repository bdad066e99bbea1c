"""What a twin is made from, and the batches that both halves train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import spec_of

Pooling = Literal["sum", "mean", "none"]
Precision = Literal["fp32", "fp16"]
Device = Literal["cpu", "cuda"]

#: FBGEMM has them on GPUs only.
_GPU_ONLY = (OptimType.ADAM, OptimType.PARTIAL_ROWWISE_ADAM, OptimType.LAMB)
_OF_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay")
#: The hyperparameters that FBGEMM's backward reads and that mean the same there.
_FBGEMM_HYPERPARAMETERS: dict[OptimType, tuple[str, ...]] = {
    OptimType.EXACT_SGD: ("learning_rate",),
    OptimType.EXACT_ADAGRAD: ("learning_rate", "eps"),
    OptimType.EXACT_ROWWISE_ADAGRAD: ("learning_rate", "eps"),
    **dict.fromkeys(_GPU_ONLY, _OF_ADAM),
}


class NoCounterpartError(ValueError):
    """FBGEMM has nothing to compare with."""


@dataclass(frozen=True)
class Table:
    """One table of a twin.

    Attributes:
        name: Unique.
        rows: Number of rows.
        dim: Columns, a multiple of 4.
        features: The features that look it up; unique over all tables. Defaults to its name.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features, with the default filled in."""
        return self.features or (self.name,)


@dataclass(frozen=True)
class Description:
    """A module of ours and its FBGEMM counterpart, described once for both.

    Attributes:
        tables: The tables.
        optimizer: Must have a counterpart in the installed FBGEMM.
        hyperparameters: Of ``fused_params``, the same for both. ``initial_accumulator_value``,
            which FBGEMM does not have, is copied into its states.
        pooling: ``none`` is a sequence module.
        weighted: Whether lookups have per-sample weights; needs pooling.
        weights_precision: fp16 weights are rounded to nearest.
        max_gradient: Bound of the output gradient's elements; None: no clipping.
        batch_size: Examples of a batch, on each rank.
        longest_bag: Bags have 0 to this many lookups.
        index_dtype: torch.int64 or torch.int32.
        seed: Of weights and batches.
        device: Where both modules are; sharded twins are on the CPU.

    Raises:
        NoCounterpartError: The optimizer exists only here, or FBGEMM's backward on this device
            computes something else by design.
        ValueError: Names repeat, or settings exclude each other.
        HyperparameterError: A hyperparameter is not legal.
    """

    tables: tuple[Table, ...]
    optimizer: OptimType
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling = "sum"
    weighted: bool = False
    weights_precision: Precision = "fp32"
    max_gradient: float | None = None
    batch_size: int = 16
    longest_bag: int = 6
    index_dtype: torch.dtype = torch.int64
    seed: int = 0
    device: Device = "cpu"

    def __post_init__(self) -> None:
        """Checks the description."""
        if self.optimizer.counterpart is None:
            raise NoCounterpartError(
                f"FBGEMM has no {self.optimizer.name}: there is no twin to compare with; the "
                "float64 reference in tests/reference.py is what it is tested against"
            )
        self._check_hyperparameters()
        if self.weighted and self.pooling == "mean" and self.device == "cpu":
            raise NoCounterpartError(
                "weighted=True with pooling='mean': FBGEMM's CPU backward does not divide by the "
                "bag's length, though its forward does; compare with pooling='sum'"
            )
        if self.weighted and self.pooling == "none":
            raise ValueError("weighted=True needs pooling='sum'")
        if self.pooling == "none" and len({table.dim for table in self.tables}) > 1:
            raise ValueError("pooling='none' needs tables of one dim")
        names = [table.name for table in self.tables]
        for what, values in (("tables", names), ("features", self.features)):
            if len(set(values)) != len(values) or not values:
                raise ValueError(f"{what} must have unique names, but are {values}")

    def _check_hyperparameters(self) -> None:
        spec = spec_of(self.optimizer)
        resolved = spec.resolve(self.hyperparameters)
        read = self._read_by_fbgemm
        if self.optimizer in _GPU_ONLY and self.device == "cpu":
            raise NoCounterpartError(
                f"FBGEMM's {self.optimizer.name} runs on GPUs only: on the CPU there is no twin to "
                "compare with; the float64 reference in tests/reference.py is what it is tested "
                "against"
            )
        for hyperparameter in spec.hyperparameters:
            name = hyperparameter.name
            shared = name in read or name == "initial_accumulator_value"
            if not shared and resolved[name] != hyperparameter.default:
                raise NoCounterpartError(
                    f"{name}={resolved[name]!r}: FBGEMM's {self.optimizer.name} has no {name} on "
                    f"the {self.device.upper()}; leave it at {hyperparameter.default!r}"
                )

    @property
    def features(self) -> list[str]:
        """All features, table by table."""
        return [feature for table in self.tables for feature in table.feature_names]

    @property
    def feature_table_map(self) -> list[int]:
        """Every feature's table."""
        return [t for t, table in enumerate(self.tables) for _ in table.feature_names]

    @property
    def fbgemm_hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that FBGEMM's constructor takes."""
        resolved = spec_of(self.optimizer).resolve(self.hyperparameters)
        return {name: resolved[name] for name in self._read_by_fbgemm}

    @property
    def _read_by_fbgemm(self) -> tuple[str, ...]:
        every = spec_of(self.optimizer).kernel_hyperparameters
        return _FBGEMM_HYPERPARAMETERS.get(self.optimizer, tuple(every))

    @property
    def clipping(self) -> dict[str, Any]:
        """FBGEMM's keywords of gradient clipping."""
        if self.max_gradient is None:
            return {}
        return {"gradient_clipping": True, "max_gradient": self.max_gradient}

    def weights(self) -> list[Tensor]:
        """The initial weights, float32 ``[rows, dim]``, exact in either precision."""
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(table.rows, table.dim, generator=generator).half().float()
            for table in self.tables
        ]

    def batches(self, steps: int, rank: int = 0) -> Iterator[Batch]:
        """The batches of a rank."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + rank + 1)
        for _ in range(steps):
            yield self._batch(generator)

    def _batch(self, generator: torch.Generator) -> Batch:
        indices, lengths = [], []
        for table in (self.tables[t] for t in self.feature_table_map):
            shape = (self.batch_size,)
            length = torch.randint(0, self.longest_bag + 1, shape, generator=generator)
            lookups = (int(length.sum()),)
            indices.append(torch.randint(0, table.rows, lookups, generator=generator))
            lengths.append(length)
        values = torch.cat(indices).to(self.device, self.index_dtype)
        weights = None
        if self.weighted:
            weights = torch.rand(values.numel(), generator=generator).to(self.device)
        all_lengths = torch.cat(lengths).to(self.device, self.index_dtype)
        return Batch(values, all_lengths, weights, generator)


@dataclass(frozen=True)
class Batch:
    """One batch: ``[lookups]`` indices and weights, ``[features * batch_size]`` lengths."""

    indices: Tensor
    lengths: Tensor
    weights: Tensor | None
    generator: torch.Generator

    @property
    def offsets(self) -> Tensor:
        """``[features * batch_size + 1]``."""
        ends = self.lengths.cumsum(0, dtype=self.lengths.dtype)
        return torch.cat([self.lengths.new_zeros(1), ends])

    def gradient(self, output: Tensor) -> Tensor:
        """A random output gradient; draws from the description's generator."""
        return torch.randn(output.shape, generator=self.generator).to(output.device)
