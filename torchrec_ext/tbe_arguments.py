"""Checks of the constructor's arguments, made before anything is allocated."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_ext import any_width, cuda
from torchrec_ext.optimizers import SPECS, OptimizerSpec

PRECISIONS = (SparseType.FP32, SparseType.FP16)
CUDA_LOCATIONS = (
    EmbeddingLocation.DEVICE,
    EmbeddingLocation.MANAGED,
    EmbeddingLocation.MANAGED_CACHING,
)

# Keywords of FBGEMM's constructor that belong to its optimizers. They never reach FBGEMM: the
# chosen optimizer's spec has them, or they are an error.
FBGEMM_OPTIMIZER_KEYWORDS = frozenset(
    (
        "ar_alpha",
        "beta1",
        "beta2",
        "counter_based_regularization",
        "cowclip_regularization",
        "ema_beta",
        "emainplace_mode",
        "ensemble_mode",
        "eps",
        "eta",
        "extra_optimizer_config",
        "global_weight_decay",
        "learning_rate",
        "max_norm",
        "min_shrinkage",
        "momentum",
        "optimizer",
        "optimizer_state_dtypes",
        "weight_decay",
        "weight_decay_mode",
    )
)
_SIGNATURE = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
FBGEMM_KEYWORDS = frozenset(_SIGNATURE) - FBGEMM_OPTIMIZER_KEYWORDS - {"self"}


def split_keywords(
    spec: OptimizerSpec, keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a constructor's keywords into FBGEMM's and the optimizer's hyperparameters.

    Raises:
        TypeError: A keyword is neither, and no hyperparameter of another optimizer either.
    """
    fbgemm = {name: value for name, value in keywords.items() if name in FBGEMM_KEYWORDS}
    hyperparameters = {name: value for name, value in keywords.items() if name not in fbgemm}
    known = set(FBGEMM_OPTIMIZER_KEYWORDS)
    for each in SPECS.values():
        known |= each.keywords.keys() | each.ignored.keys()
    for name, value in hyperparameters.items():
        if name not in known:
            raise TypeError(
                f"{name}={value!r} is neither a keyword of FBGEMM's module nor a hyperparameter of "
                f"{spec.optimizer.name}, which has {', '.join(sorted(spec.keywords))}"
            )
    return fbgemm, hyperparameters


def max_gradient_of(fbgemm_keywords: Mapping[str, Any]) -> float:
    """The bound on the output gradient's elements; infinity without ``gradient_clipping``.

    Raises:
        ValueError: ``max_gradient`` is not a number >= 0 or has no effect, or ``gradient_clipping``
            is no bool.
    """
    clips = fbgemm_keywords.get("gradient_clipping", False)
    if not isinstance(clips, bool):
        raise ValueError(f"gradient_clipping={clips!r} is not legal; it must be True or False")
    value = fbgemm_keywords.get("max_gradient", 1.0)
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0.0:
        raise ValueError(f"max_gradient={value!r} is not legal; it must be a number >= 0")
    if not clips and "max_gradient" in fbgemm_keywords:
        raise ValueError(
            f"max_gradient={value!r} has no effect without gradient_clipping=True; give both"
        )
    return float(value) if clips else math.inf


def check_feature_table_map(feature_table_map: Sequence[int] | None, names: Sequence[str]) -> None:
    """Checks which table each feature reads.

    Raises:
        ValueError: A feature reads a table that there is not, or a table has no feature.
    """
    if feature_table_map is None:
        return
    read = list(feature_table_map)
    if set(read) != set(range(len(names))):
        raise ValueError(
            f"feature_table_map={read} must name every one of the {len(names)} tables "
            f"{list(names)} by its number, at least once"
        )


def check_tables(
    embedding_specs: Sequence[tuple[int, int, Any, ComputeDevice]],
    feature_table_map: Sequence[int] | None,
    fbgemm_keywords: Mapping[str, Any],
) -> None:
    """Checks features, dims, devices and the weights' precision.

    Raises:
        ValueError: One of them is not supported.
    """
    count = len(embedding_specs)
    if not embedding_specs:
        raise ValueError("embedding_specs is empty; give at least one table")
    names = fbgemm_keywords.get("table_names") or [str(t) for t in range(count)]
    if len(names) != count:
        raise ValueError(f"table_names={list(names)} are {len(names)} names for {count} tables")
    check_feature_table_map(feature_table_map, names)
    on_cuda = embedding_specs[0][3] == ComputeDevice.CUDA
    if on_cuda:
        output_dtype = fbgemm_keywords.get("output_dtype", SparseType.FP32)
        any_width.check_on_device(embedding_specs, names, output_dtype)
    for name, (rows, dim, location, device) in zip(names, embedding_specs, strict=True):
        if rows < 0 or dim <= 0:
            raise ValueError(
                f"table {name!r} has {rows} rows of dim {dim}; rows are at least 0, dims at least 1"
            )
        _check_placement(name, dim, location, device)
        if (device == ComputeDevice.CUDA) != on_cuda:
            raise ValueError(
                f"table {name!r} is on {device.name}, table {names[0]!r} on "
                f"{embedding_specs[0][3].name}; the tables of one module are on one kind of device"
            )
    precision = fbgemm_keywords.get("weights_precision", SparseType.FP32)
    if precision not in PRECISIONS and not (on_cuda and precision == SparseType.BF16):
        raise ValueError(
            f"tables {list(names)}: weights_precision={precision} is not supported; "
            "use FP32 or FP16, or BF16 on CUDA"
        )


def check_mode(
    embedding_specs: Sequence[tuple[int, int, Any, ComputeDevice]],
    resolved: Mapping[str, Any],
    drop_bad_indices: bool,
    names: Sequence[Any],
) -> None:
    """Checks that the tables' device has the modes that are asked for.

    Raises:
        ValueError: ``sparse_mode="dense"`` or ``drop_bad_indices=True`` on CUDA.
    """
    on_cuda = any(device == ComputeDevice.CUDA for _, _, _, device in embedding_specs)
    if on_cuda and resolved.get("sparse_mode") == "dense":
        raise ValueError(
            f"tables {list(names)}: sparse_mode='dense' runs on the CPU only; use 'lazy' on CUDA"
        )
    if on_cuda and drop_bad_indices:  # how many are left is not known without waiting for it
        raise ValueError(
            f"tables {list(names)}: drop_bad_indices=True runs on the CPU only; on CUDA take bad "
            "indices out of the batch before"
        )


def check_types(fbgemm_keywords: Mapping[str, Any]) -> None:
    """Checks the types of FBGEMM's keywords, most of which it takes as they come.

    Raises:
        ValueError: One is of another type than FBGEMM's signature says.
    """
    for name, value in fbgemm_keywords.items():
        expected = _SIGNATURE[name].annotation
        if name == "max_gradient" or not isinstance(expected, type):
            continue
        legal: tuple[type, ...] = (expected,)
        if expected is SparseType:
            legal = (enum.Enum,)  # TorchRec's DataType as well
        elif expected is float:
            legal = (float, int)
        is_bool = isinstance(value, bool) and expected is not bool
        if is_bool or not isinstance(value, legal):
            example = "True or False" if expected is bool else f"a {expected.__name__}"
            if issubclass(expected, enum.Enum):
                names = ", ".join(member.name for member in expected)
                example += f": one of {names}"
            raise ValueError(f"{name}={value!r} is not legal; it must be {example}")


def check_own_keywords(keywords: Mapping[str, Any]) -> None:
    """Checks the keywords that are neither FBGEMM's nor hyperparameters, where they are given.

    Raises:
        ValueError: ``rounding_seed`` is no integer of 64 bits, or ``drop_bad_indices`` no bool.
    """
    seed = keywords.get("rounding_seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"rounding_seed={seed!r} is not legal; it must be an integer of 64 bits")
    drops = keywords.get("drop_bad_indices", False)
    if not isinstance(drops, bool):
        raise ValueError(f"drop_bad_indices={drops!r} is not legal; it must be True or False")


def _check_placement(name: str, dim: int, location: Any, device: ComputeDevice) -> None:
    if device == ComputeDevice.CPU:
        return
    if device != ComputeDevice.CUDA:
        raise ValueError(
            f"table {name!r} is on {device.name}; torchrec_ext has kernels for CPU and CUDA"
        )
    missing = cuda.load()
    if missing is not None:
        raise ValueError(
            f"table {name!r} is on {device.name}, but {missing}; {cuda.HOW_TO_BUILD}, or use "
            "ComputeDevice.CPU with EmbeddingLocation.HOST"
        )
    if dim > cuda.MAX_DIM:
        raise ValueError(
            f"table {name!r} has dim {dim}; on CUDA dims are at most {cuda.MAX_DIM}: split it "
            "by column-wise sharding"
        )
    if location not in CUDA_LOCATIONS:
        raise ValueError(
            f"table {name!r} is on {device.name} with {location.name}; use one of "
            f"{[each.name for each in CUDA_LOCATIONS]}"
        )
