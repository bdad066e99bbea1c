"""Examples in memory: bags of row indices per feature, dense columns, labels."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def stable_hash(column: str, token: str, rows: int) -> int:
    """Map a token of a column to a row, the same on every machine, run and rank.

    Python's own ``hash`` is salted per process and would give each rank its own rows.

    Args:
        column: Name of the column; equal tokens of two columns hash apart.
        token: The raw text.
        rows: Size of the table.

    Returns:
        A row in ``[0, rows)``: CRC-32 of column and token, modulo ``rows``.
    """
    return zlib.crc32(f"{column}\t{token}".encode()) % rows


@dataclass(frozen=True)
class Bags:
    """One categorical feature over all examples.

    Attributes:
        values: int64 row indices, example after example; a slice shares those of the whole.
        offsets: ``[examples + 1]`` int64; example ``i`` holds ``values[offsets[i]:offsets[i+1]]``.
        rows: Number of distinct indices; every value is in ``[0, rows)``.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    rows: int

    @classmethod
    def single(cls, values: torch.Tensor, rows: int) -> Bags:
        """Build a feature with exactly one index per example from ``[examples]`` int64."""
        return cls(values, torch.arange(values.numel() + 1), rows)

    @classmethod
    def from_lists(cls, lists: list[list[int]], rows: int) -> Bags:
        """Build a feature from one list of indices per example; lists may be empty."""
        lengths = torch.tensor([len(bag) for bag in lists], dtype=torch.int64)
        values = torch.tensor([index for bag in lists for index in bag], dtype=torch.int64)
        return cls(values, offsets_of(lengths), rows)

    def select(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the bags of the examples in ``index``.

        Args:
            index: ``[batch]`` int64 example numbers, in any order, repeats allowed.

        Returns:
            ``(values, lengths)``: the concatenated bags and their ``[batch]`` int64 lengths.
        """
        starts = self.offsets[index]
        lengths = self.offsets[index + 1] - starts
        total = int(lengths.sum())
        # Position k of the result belongs to bag b and reads starts[b] + (k - first k of b).
        shift = starts - offsets_of(lengths)[:-1]
        positions = torch.arange(total) + torch.repeat_interleave(shift, lengths)
        return self.values[positions], lengths


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Turn ``[n]`` lengths into ``[n + 1]`` offsets that start with 0."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch.

    Attributes:
        sparse: All features, keys in the data set's order, ``batch`` bags each.
        dense: ``[batch, dense columns]`` float32.
        labels: ``[batch]`` float32, 0 or 1.
        count: How many leading examples are real; the rest repeats the last example so that
            every rank has a batch of the same size.
    """

    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor
    count: int


@dataclass(frozen=True)
class Examples:
    """A table of examples in the order in which they happened.

    Attributes:
        features: Bags by feature name; all have as many examples as ``labels``.
        dense: ``[examples, dense columns]`` float32, zero columns when a data set has none.
        labels: ``[examples]`` float32, 0 or 1.
        crossed: Names of the features that are crosses of others; a deep model leaves them out.
    """

    features: Mapping[str, Bags]
    dense: torch.Tensor
    labels: torch.Tensor
    crossed: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.labels.numel()

    def rows(self) -> dict[str, int]:
        """Give the table size of every feature."""
        return {name: bags.rows for name, bags in self.features.items()}

    def slice(self, start: int, stop: int) -> Examples:
        """Take the consecutive examples ``[start, stop)``; nothing is copied."""
        return Examples(
            {
                name: Bags(bags.values, bags.offsets[start : stop + 1], bags.rows)
                for name, bags in self.features.items()
            },
            self.dense[start:stop],
            self.labels[start:stop],
            self.crossed,
        )

    def batch(self, index: torch.Tensor, count: int) -> Batch:
        """Gather the examples in ``index`` (``[batch]`` int64), ``count`` of which are real."""
        picked = [bags.select(index) for bags in self.features.values()]
        sparse = KeyedJaggedTensor.from_lengths_sync(
            keys=list(self.features),
            values=torch.cat([values for values, _ in picked]),
            lengths=torch.cat([lengths for _, lengths in picked]),
        )
        return Batch(sparse, self.dense[index], self.labels[index], count)


@dataclass(frozen=True)
class RankSlices:
    """Cuts global batches into equal slices, one per rank.

    The global batches and their order do not depend on the number of ranks: rank ``r`` of ``w``
    takes examples ``[r * size / w, (r + 1) * size / w)`` of each.

    Attributes:
        batch_size: Size of the global batch, a multiple of ``world_size``.
        rank: This rank.
        world_size: Number of ranks.
    """

    batch_size: int
    rank: int
    world_size: int

    def training(
        self, examples: Examples, seed: int, shuffle: bool, first: int = 0
    ) -> Iterator[Batch]:
        """Yield this rank's slices of one epoch; an incomplete last global batch is dropped.

        Args:
            examples: The training examples.
            seed: Decides the order when ``shuffle`` is set; equal on every rank.
            shuffle: Whether to visit the examples in random order instead of their own.
            first: The global batch to begin with; those before it are left out.
        """
        generator = torch.Generator().manual_seed(seed)
        total = len(examples)
        order = torch.randperm(total, generator=generator) if shuffle else torch.arange(total)
        size = self.batch_size // self.world_size
        for start in range(first * self.batch_size, total - self.batch_size + 1, self.batch_size):
            begin = start + self.rank * size
            yield examples.batch(order[begin : begin + size], size)

    def evaluation(self, examples: Examples) -> Iterator[Batch]:
        """Yield this rank's slices of all examples in order; short slices are padded."""
        size = self.batch_size // self.world_size
        total = len(examples)
        for start in range(0, total, self.batch_size):
            first = start + self.rank * size
            index = torch.arange(first, first + size)
            yield examples.batch(index.clamp(max=total - 1), min(size, max(0, total - first)))
