"""The configuration of a training run: a YAML file checked field by field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import SPECS, HyperparameterError

# FBGEMM's own optimizers, for comparisons: type -> hyperparameters and their defaults. FBGEMM's
# CPU modules know no others.
FBGEMM_OPTIMIZERS: dict[str, dict[str, float]] = {
    "fbgemm_exact_sgd": {"learning_rate": 0.01},
    "fbgemm_exact_adagrad": {"learning_rate": 0.01, "eps": 1e-8},
    "fbgemm_exact_rowwise_adagrad": {"learning_rate": 0.01, "eps": 1e-8},
}
FLOAT32_MAX = 3.4028234663852886e38
OPTIM_TYPE_OF_NAME: dict[str, OptimType] = {optim.name.lower(): optim for optim in SPECS}

ShardingTypeName = Literal[
    "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"
]


def did_you_mean(given: str, legal: Sequence[str], prefix: str = "") -> str:
    """Suggest the nearest legal name, as the end of an error message; empty if none is near.

    Args:
        given: What the user wrote.
        legal: What would have been legal.
        prefix: Text to put before the suggested name.
    """
    close = [name for name in legal if given and name.startswith(given)]
    close = close or difflib.get_close_matches(given, legal, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
# FBGEMM's rows are multiples of 4 columns.
Dim = Annotated[int, Field(ge=4, le=2048, multiple_of=4)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Section(BaseModel):
    """A mapping of the file: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


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
    rows: Count = 1_000
    bag: Count = 2
    zipf: float = Field(1.05, ge=0, le=100)
    informative: float = Field(0.2, ge=0, le=1)
    seed: Seed = 0


DataConfig = Annotated[MovieLensData | CriteoData | SyntheticData, Field(discriminator="dataset")]


class LinearModel(Section):
    """Logistic regression on wide tables."""

    type: Literal["linear"]
    wide_dim: Dim = 4


class WideDeepModel(Section):
    """The linear model plus deep tables and an over-arch."""

    type: Literal["wide_deep"]
    wide_dim: Dim = 4
    deep_dim: Dim = 16
    hidden: list[Count] = Field(default_factory=lambda: [64, 32])


ModelConfig = Annotated[LinearModel | WideDeepModel, Field(discriminator="type")]


class OptimizerConfig(BaseModel):
    """A fused optimizer: its type and, beside it, that type's hyperparameters.

    Types are the members of ``OptimType`` in lower case and, for comparisons, FBGEMM's own behind
    the prefix ``fbgemm_``. Names, ranges and defaults of hyperparameters are the optimizer's spec.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
            return given  # The field's own error names what is wrong.
        name = given["type"]
        hyperparameters = {key: value for key, value in given.items() if key != "type"}
        if name in OPTIM_TYPE_OF_NAME:
            resolved = _resolve_ours(OPTIM_TYPE_OF_NAME[name], hyperparameters)
        elif name in FBGEMM_OPTIMIZERS:
            resolved = _resolve_fbgemm(name, hyperparameters)
        else:
            legal = [*OPTIM_TYPE_OF_NAME, *FBGEMM_OPTIMIZERS]
            reason = f"{name!r} is not one of {', '.join(legal)}"
            raise _error("type", reason + did_you_mean(name, legal))
        return {"type": name, **resolved}

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every hyperparameter by its own name, defaults filled in."""
        return dict(self.model_extra or {})

    @property
    def ours(self) -> OptimType | None:
        """The ``OptimType``, or None for one of FBGEMM's."""
        return OPTIM_TYPE_OF_NAME.get(self.type)


class DenseOptimizerConfig(Section):
    """torch.optim.Adam for the bias and the over-arch."""

    # The upper ends keep Adam's float32 arithmetic finite.
    learning_rate: float = Field(1e-3, gt=0, le=1e6)
    weight_decay: float = Field(0.0, ge=0, le=1e6)


class TrainConfig(Section):
    """How long and in which portions to train; ``batch_size`` counts the examples of all ranks."""

    batch_size: Count = 512
    epochs: Count = 1
    max_steps: Count | None = None
    shuffle: bool = True


class ShardingConfig(Section):
    """Restrictions on the planner.

    Without ``types`` it chooses among table_wise, column_wise and row_wise, as far as the sharder
    offers them for the optimizer. ``tables`` settles the type of single tables by name.
    """

    types: list[ShardingTypeName] | None = Field(None, min_length=1)
    tables: dict[str, ShardingTypeName] = Field(default_factory=dict)


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

    @model_validator(mode="after")
    def _deep_optimizer_fits_model(self, _: ValidationInfo) -> Config:
        deep = isinstance(self.model, WideDeepModel)
        if deep and self.deep_optimizer is None:
            raise _error("deep_optimizer", "missing; model.type wide_deep needs one")
        if not deep and self.deep_optimizer is not None:
            raise _error("deep_optimizer", "has no effect with model.type linear; remove it")
        return self


def _resolve_ours(optim_type: OptimType, given: Mapping[str, Any]) -> dict[str, float]:
    spec = SPECS[optim_type]
    for key, value in given.items():
        if key in spec.ignored:
            raise _error(key, f"has no effect: {spec.ignored[key]}")
        _check_known(key, list(spec.keywords))
        _check_float32(key, value)
    try:
        return spec.resolve(given)
    except HyperparameterError as error:
        raise PydanticCustomError("hyperparameter", "{reason}", {"reason": str(error)}) from error


def _resolve_fbgemm(name: str, given: Mapping[str, Any]) -> dict[str, float]:
    resolved = dict(FBGEMM_OPTIMIZERS[name])
    for key, value in given.items():
        _check_known(key, list(resolved))
        _check_float32(key, value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise _error(key, f"{value!r} is not a finite number >= 0")
        resolved[key] = float(value)
    return resolved


def _check_float32(key: str, value: Any) -> None:
    if isinstance(value, int | float) and abs(value) > FLOAT32_MAX:
        raise _error(key, f"{value!r} is not a finite number of float32")


def _check_known(key: str, legal: list[str]) -> None:
    if key not in legal:
        reason = f"unknown key; the legal ones are {', '.join(legal)}"
        raise _error(key, reason + did_you_mean(key, legal))


def _error(key: str, reason: str) -> PydanticCustomError:
    """Build an error about a key below the section whose validator raises it."""
    return PydanticCustomError("section_key", "{reason}", {"key": key, "reason": reason})
