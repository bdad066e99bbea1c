"""Criteo click logs: tab-separated label, 13 integer columns, 26 categorical columns."""

from __future__ import annotations

import gzip
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from torchrec_ext.command.errors import UserError
from torchrec_ext.train.data.examples import Bags, Examples, stable_hash

DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
# log1p(2^31 - 1)^2 is 461, so every count of the logs has a bucket of its own.
DENSE_ROWS = 512


def load_criteo(path: str, rows_per_feature: int, max_examples: int | None) -> Examples:
    """Read a click log in the order of its lines, which is the order of time.

    Categorical tokens are hashed into tables of ``rows_per_feature`` rows, an empty field being a
    token like any other. A count ``x`` becomes the dense value ``log(1 + max(x, 0))``, 0 where the
    field is empty, and also the row of a bucket, so that a linear model can use it.

    Args:
        path: The file, plain or with the suffix ``.gz``.
        rows_per_feature: Table size of each categorical feature.
        max_examples: Stop after so many lines; None reads all.

    Raises:
        UserError: If the file is missing or a line is malformed.
    """
    dense, rows, labels = array("f"), array("q"), array("f")
    try:
        with _open(path) as lines:
            for counts, tokens, label in _parse(path, lines, max_examples):
                dense.extend(math.log1p(max(count or 0, 0)) for count in counts)
                rows.extend(dense_bucket(count) for count in counts)
                rows.extend(
                    stable_hash(name, token, rows_per_feature)
                    for name, token in zip(CATEGORICAL, tokens, strict=True)
                )
                labels.append(label)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read data.path {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    if not labels:
        raise UserError(f"{path} holds no examples")
    table = torch.frombuffer(rows, dtype=torch.int64).view(len(labels), -1).T
    offsets = torch.arange(len(labels) + 1)
    sizes = [DENSE_ROWS] * len(DENSE) + [rows_per_feature] * len(CATEGORICAL)
    features = {
        name: Bags(column, offsets, size)
        for name, column, size in zip(DENSE + CATEGORICAL, table, sizes, strict=True)
    }
    values = torch.frombuffer(dense, dtype=torch.float32).view(len(labels), -1)
    return Examples(features, values, torch.frombuffer(labels, dtype=torch.float32))


def dense_bucket(count: int | None) -> int:
    """Give the row of a count: 0 missing, 1 negative, then ``2 + floor(log(1 + count)^2)``."""
    if count is None:
        return 0
    if count < 0:
        return 1
    return min(2 + int(math.log1p(count) ** 2), DENSE_ROWS - 1)


def _open(path: str) -> IO[str]:
    if Path(path).suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _parse(
    path: str, lines: IO[str], max_examples: int | None
) -> Iterator[tuple[list[int | None], list[str], float]]:
    """Yield the counts, the categorical tokens and the label of each line."""
    width = 1 + len(DENSE) + len(CATEGORICAL)
    for number, line in enumerate(lines, start=1):
        if max_examples is not None and number > max_examples:
            return
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != width:
            raise UserError(f"{path}:{number}: {len(fields)} tab-separated fields, not {width}")
        if fields[0] not in ("0", "1"):
            raise UserError(f"{path}:{number}: the label is {fields[0]!r}, not 0 or 1")
        counts = [
            _count(path, number, name, text)
            for name, text in zip(DENSE, fields[1 : 1 + len(DENSE)], strict=True)
        ]
        yield counts, fields[1 + len(DENSE) :], float(fields[0])


def _count(path: str, number: int, name: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise UserError(f"{path}:{number}: {name} is {text!r}, not an integer") from error
