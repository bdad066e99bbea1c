"""Parts of configuration files: how sections are checked, and the section of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from torchrec_ext.optim_type import OptimType
from torchrec_ext.optimizers import SPECS, HyperparameterError
from torchrec_ext.spelling import did_you_mean

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
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
# Rows of FBGEMM's own modules are multiples of 4 columns, those of ours have any width.
Dim = Annotated[int, Field(ge=4, le=2048, multiple_of=4)]
Width = Annotated[int, Field(ge=1, le=2048)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Section(BaseModel):
    """A mapping of the file: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


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
            raise key_error("type", reason + did_you_mean(name, legal))
        return {"type": name, **resolved}

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every hyperparameter by its own name, defaults filled in."""
        return dict(self.model_extra or {})

    @property
    def ours(self) -> OptimType | None:
        """The ``OptimType``, or None for one of FBGEMM's."""
        return OPTIM_TYPE_OF_NAME.get(self.type)


def _resolve_ours(optim_type: OptimType, given: Mapping[str, Any]) -> dict[str, float]:
    spec = SPECS[optim_type]
    for key, value in given.items():
        if key in spec.ignored:
            raise key_error(key, f"has no effect: {spec.ignored[key]}")
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
            raise key_error(key, f"{value!r} is not a finite number >= 0")
        resolved[key] = float(value)
    return resolved


def _check_float32(key: str, value: Any) -> None:
    if isinstance(value, int | float) and abs(value) > FLOAT32_MAX:
        raise key_error(key, f"{value!r} is not a finite number of float32")


def _check_known(key: str, legal: list[str]) -> None:
    if key not in legal:
        reason = f"unknown key; the legal ones are {', '.join(legal)}"
        raise key_error(key, reason + did_you_mean(key, legal))


def key_error(key: str, reason: str) -> PydanticCustomError:
    """Build an error about a key below the section whose validator raises it."""
    return PydanticCustomError("section_key", "{reason}", {"key": key, "reason": reason})
