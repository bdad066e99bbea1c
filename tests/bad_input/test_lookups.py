"""Batches that a module cannot look up, or looks up in a way that has to be known."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from .harness import GOOD_ROWS, TABLES, Case, judge


def _indices(*values: int, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    return {"indices": torch.tensor(values, dtype=dtype)}


def _offsets(*values: float, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    return {"offsets": torch.tensor(values, dtype=dtype)}


def _mode(mode: str, **settings):
    return {"bounds_check_mode": BoundsCheckMode[mode], **settings}


MODES = ("FATAL", "WARNING", "IGNORE", "NONE")
OUTSIDE = {"the number of rows": 7, "1e9": 10**9, "-1": -1, "-2": -2}
# The first lookup is the bad one: row 0 of user is trained in its place.
REWRITTEN = ({0, 2}, {1})


def _index_cases():
    for mode in MODES:
        for name, index in OUTSIDE.items():
            raises = mode in ("FATAL", "NONE") or index == -1
            yield Case(
                "index outside of the table",
                f"{name}, {mode}",
                _indices(index, 2, 1),
                RuntimeError if raises else None,
                rf"table 'user' has 7 rows here, but indices\[0\]={index} \(feature 0; .*drop_bad",
                REWRITTEN,
                _mode(mode),
            )
            yield Case(
                "index outside of the table, drop_bad_indices",
                f"{name}, {mode}",
                _indices(index, 2, 1),
                rows=({2}, {1}),
                settings=_mode(mode, drop_bad_indices=True),
            )
    yield Case(
        "index outside of the table",
        "in the second table",
        _indices(3, 2, 5),
        RuntimeError,
        r"table 'item' has 5 rows here, but indices\[2\]=5 \(feature 1",
        settings=_mode("FATAL"),
    )


def _offset_cases():
    bad = {
        "a bag of negative length": ((0, -2, 3), ({}, {3, 2, 1})),
        "the last offset too small": ((0, 2, 2), GOOD_ROWS),
        "the last offset too large": ((0, 2, 9), GOOD_ROWS),
    }
    for name, (offsets, rows) in bad.items():
        for mode in MODES:
            refused = {"FATAL": RuntimeError, "NONE": ValueError}.get(mode)
            yield Case(
                "offsets that no batch has",
                f"{name}, {mode}",
                _offsets(*offsets),
                refused,
                f"{TABLES}: offsets must (not descend|start at 0 and end at the number of indic)",
                (set(rows[0]), set(rows[1])),
                _mode(mode),
            )
    for mode in MODES:
        yield Case(
            "first offset",
            mode,
            _offsets(1, 2, 3),
            ValueError,
            f"{TABLES}: offsets must start at 0",
            settings=_mode(mode),
        )
    yield Case(
        "offsets that no batch has",
        "drop_bad_indices",
        _offsets(0, -2, 3),
        ValueError,
        "bag 0 has a negative length",
        settings={"drop_bad_indices": True},
    )
    for name, offsets in {"four for two features": (0, 1, 2, 3), "none": ()}.items():
        yield Case(
            "number of offsets",
            name,
            _offsets(*offsets),
            ValueError,
            rf"{TABLES}: offsets has {len(offsets)} elements, expected features \* batch_size \+ 1",
        )


def _dtype_cases():
    for dtype in (torch.float32, torch.float16, torch.int16, torch.bool):
        for argument, given in (("indices", _indices(3, 2, 1)), ("offsets", _offsets(0, 2, 3))):
            yield Case(
                "dtype of indices and offsets",
                f"{argument} {dtype}",
                {argument: given[argument].to(dtype)},
                TypeError,
                rf"{TABLES}: {argument} has dtype {dtype}, expected torch.int32 or torch.int64;",
            )
    yield Case(
        "dtype of indices and offsets", "int32 and int64", _indices(3, 2, 1, dtype=torch.int32)
    )
    for argument in ("indices", "offsets", "per_sample_weights"):
        yield Case(
            "no tensor",
            argument,
            {argument: [0, 2, 3]},
            TypeError,
            f"{TABLES}: {argument} is a list, expected a tensor",
        )
        on_meta = torch.zeros(3, device="meta", dtype=torch.int64)
        yield Case(
            "device",
            argument,
            {argument: on_meta},
            ValueError,
            rf"{TABLES}: {argument} is on meta, the tables are on cpu; move it with .to\('cpu'\)",
        )
        yield Case(
            "number of dimensions",
            argument,
            {argument: torch.zeros(3, 1, dtype=torch.int64)},
            ValueError,
            rf"{TABLES}: {argument} has shape \[3, 1\], expected one dimension",
        )


def _weight_cases():
    for count in (0, 2, 4):
        yield Case(
            "number of per-sample weights",
            str(count),
            {"per_sample_weights": torch.ones(count)},
            ValueError,
            f"{TABLES}: per_sample_weights has {count} elements for 3 indices, expected one for ea",
        )
    yield Case(
        "per-sample weights without pooling",
        "none",
        {"per_sample_weights": torch.ones(3)},
        ValueError,
        f"{TABLES}: per_sample_weights need sum or mean pooling",
        settings={"pooling": "none"},
    )
    yield Case(
        "per-sample weights with mean pooling and float16 output",
        "FP16",
        {"per_sample_weights": torch.ones(3)},
        ValueError,
        f"{TABLES}: per_sample_weights with mean pooling need output_dtype=SparseType.FP32",
        settings={"pooling": "mean", "output_dtype": SparseType.FP16},
    )
    yield Case(
        "complex per-sample weights",
        "complex64",
        {"per_sample_weights": torch.ones(3, dtype=torch.complex64)},
        TypeError,
        f"{TABLES}: per_sample_weights has dtype torch.complex64, expected real",
    )
    yield Case(
        "per-sample weights that are not finite",
        "NaN",
        {"per_sample_weights": torch.tensor([1.0, float("nan"), 1.0])},
    )
    yield Case(
        "integer per-sample weights",
        "int64",
        {"per_sample_weights": torch.tensor([1, 2, 3])},
    )


def _variable_cases():
    for sizes, message in {
        ((1,),): "has batch sizes for 1 features, expected 2",
        ((1,), (1, 0)): r"for \[1, 2\] ranks; every feature needs one for each",
        ((), ()): "every feature needs one for each rank",
        ((3,), (-1,)): "has a batch size below 0",
        ((2,), (1,)): "adds up to 3 bags, but the offsets are those of 2",
        ((1.0,), (1.0,)): "must be a list of integers for each feature",
        (("1",), (True,)): "must be a list of integers for each feature",
        (1, 1): "must be a list of integers for each feature",
        "ab": "must be a list of integers for each feature",
    }.items():
        yield Case(
            "variable batch sizes",
            str(sizes),
            {"batch_size_per_feature_per_rank": sizes},
            ValueError,
            f"{TABLES}: batch_size_per_feature_per_rank.*{message}",
        )
    yield Case(
        "variable batch sizes without pooling",
        "none",
        {"batch_size_per_feature_per_rank": [[1], [1]]},
        ValueError,
        "batch_size_per_feature_per_rank needs sum or mean pooling",
        settings={"pooling": "none"},
    )
    yield Case(
        "vbe_output",
        "given",
        {"batch_size_per_feature_per_rank": [[1], [1]], "vbe_output": torch.zeros(8)},
        NotImplementedError,
        f"{TABLES}: vbe_output is not supported; leave it out",
    )


CASES = [
    *_index_cases(),
    *_offset_cases(),
    *_dtype_cases(),
    *_weight_cases(),
    *_variable_cases(),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lookup(case: Case) -> None:
    judge(case)
