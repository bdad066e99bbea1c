"""The configuration of a training run: a YAML file checked field by field."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from torchrec_ext.command.sections import (
    Count,
    OptimizerConfig,
    Section,
    Seed,
    ShardingTypeName,
    Width,
    key_error,
)

# What the tables of FBGEMM's own optimizers take.
FBGEMM_WIDTH = 4


class _DataSection(Section):
    test_fraction: float = Field(0.2, gt=0, lt=1)
    evaluate_on: Literal["test", "validation"] = "test"


class MovieLensData(_DataSection):
    """MovieLens-100k; ``path`` is the folder of its files, by default the recbole wheel's."""

    dataset: Literal["movielens-100k"]
    path: str | None = None


class CriteoData(_DataSection):
    """A Criteo click log; its categorical tokens are hashed into ``rows_per_feature`` rows."""

    dataset: Literal["criteo-tsv"]
    path: str
    rows_per_feature: Count = 100_000
    max_examples: Count | None = None


class SyntheticData(_DataSection):
    """Zipf-distributed rows; see ``torchrec_ext.train.data.synthetic.load_synthetic``."""

    dataset: Literal["synthetic"]
    examples: Count = 20_000
    features: Count = 8
    rows: int = Field(1_000, ge=1, le=10_000_000)
    bag: Count = 2
    zipf: float = Field(1.05, ge=0, le=100)
    informative: float = Field(0.2, ge=0, le=1)
    seed: Seed = 0


DataConfig = Annotated[MovieLensData | CriteoData | SyntheticData, Field(discriminator="dataset")]


class LinearModel(Section):
    """Logistic regression on wide tables."""

    type: Literal["linear"]
    wide_dim: Width = 4
    wide_start: Literal["zeros", "uniform"] = "zeros"


class WideDeepModel(Section):
    """The linear model plus deep tables and an over-arch."""

    type: Literal["wide_deep"]
    wide_dim: Width = 4
    deep_dim: Width = 16
    hidden: list[Count] = Field(default_factory=lambda: [64, 32])


class FactorizationMachineModel(Section):
    """The linear model plus products of the features' factors, which ``deep_optimizer`` trains."""

    type: Literal["factorization_machine"]
    wide_dim: Width = 1
    factor_dim: Width = 8


class PairwiseDotsModel(Section):
    """A factorization machine without a linear part: ``optimizer`` trains its only tables."""

    type: Literal["pairwise_dots"]
    factor_dim: Width = 8


ModelConfig = Annotated[
    LinearModel | WideDeepModel | FactorizationMachineModel | PairwiseDotsModel,
    Field(discriminator="type"),
]


class DenseOptimizerConfig(Section):
    """torch.optim.Adam for the bias and the over-arch."""

    # The upper ends keep Adam's float32 arithmetic finite.
    learning_rate: float = Field(1e-3, gt=0, le=1e6)
    weight_decay: float = Field(0.0, ge=0, le=1e6)


class TrainConfig(Section):
    """How long and in which portions to train; ``batch_size`` counts the examples of all ranks.

    ``abort_seconds``: within this time of an error on one rank all others end as well.

    Zero weights are counted in every evaluation, and after every ``zeros_every_steps`` steps.
    """

    batch_size: Count = 512
    epochs: Count = 1
    max_steps: Count | None = None
    shuffle: bool = True
    abort_seconds: float = Field(10.0, gt=0, le=1e6)
    zeros_every_steps: Count | None = None


class ShardingConfig(Section):
    """Restrictions on the planner.

    Without ``types`` it chooses among table_wise, column_wise and row_wise, as far as the sharder
    offers them for the optimizer. ``tables`` settles the type of single tables by name.
    """

    types: list[ShardingTypeName] | None = Field(None, min_length=1)
    tables: dict[str, ShardingTypeName] = Field(default_factory=dict)


class CheckpointConfig(Section):
    """How often to save the run, and how many of the newest checkpoints to keep."""

    every_steps: Count
    keep: Count = 3


class Config(Section):
    """One training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: Seed = 0
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    deep_optimizer: OptimizerConfig | None = None
    dense_optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    train: TrainConfig = TrainConfig()
    sharding: ShardingConfig = ShardingConfig()
    checkpoint: CheckpointConfig | None = None

    @property
    def optimizer_of_factors(self) -> OptimizerConfig:
        """The optimizer of tables that are not wide."""
        return self.deep_optimizer or self.optimizer

    @model_validator(mode="after")
    def _deep_optimizer_fits_model(self, _: ValidationInfo) -> Config:
        deep = isinstance(self.model, WideDeepModel | FactorizationMachineModel)
        if deep and self.deep_optimizer is None:
            reason = f"missing; model.type {self.model.type} needs one"
            raise key_error("deep_optimizer", reason)
        if not deep and self.deep_optimizer is not None:
            reason = f"has no effect with model.type {self.model.type}; remove it"
            raise key_error("deep_optimizer", reason)
        return self

    @model_validator(mode="after")
    def _widths_suit_optimizers(self, _: ValidationInfo) -> Config:
        for key in ("wide_dim", "deep_dim", "factor_dim"):
            optimizer = self.optimizer if key == "wide_dim" else self.optimizer_of_factors
            width = getattr(self.model, key, None)
            if width is None or optimizer.ours is not None:
                continue
            if width % FBGEMM_WIDTH != 0:
                raise key_error(
                    f"model.{key}",
                    f"{width} columns, but the tables of {optimizer.type} have multiples of "
                    f"{FBGEMM_WIDTH}; choose one, or an optimizer without fbgemm_",
                )
        return self
