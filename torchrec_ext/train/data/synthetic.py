"""Synthetic clicks: Zipf-distributed rows and labels of a sparse logistic model."""

from __future__ import annotations

import numpy as np
import torch

from torchrec_ext.train.data.examples import Bags, Examples, offsets_of


def load_synthetic(
    *,
    examples: int,
    features: int,
    rows: int,
    bag: int,
    zipf: float,
    informative: float,
    seed: int,
) -> Examples:
    """Draw examples whose true weights are known to be sparse.

    Row ``k`` (from 0) of a feature occurs with probability proportional to ``(k + 1) ** -zipf``.
    A share ``informative`` of all rows has a weight drawn from N(0, 1), the others 0; the label is
    1 with the probability of the logistic function of the sum of an example's weights.

    Args:
        examples: Number of examples.
        features: Number of features, named ``f0``, ``f1``, ...
        rows: Table size of each feature.
        bag: Rows per bag, at most; lengths are uniform over 1 to ``bag``.
        zipf: Exponent of the distribution; 0 is uniform.
        informative: Share of rows with a non-zero weight, 0 to 1.
        seed: Seed of everything drawn here.
    """
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -zipf)
    logits = np.zeros(examples)
    bags = {}
    for number in range(features):
        lengths = generator.integers(1, bag + 1, size=examples)
        draws = generator.random(int(lengths.sum())) * cumulative[-1]
        values = np.minimum(np.searchsorted(cumulative, draws, side="right"), rows - 1)
        weights = generator.standard_normal(rows) * (generator.random(rows) < informative)
        logits += np.bincount(np.repeat(np.arange(examples), lengths), weights[values], examples)
        offsets = offsets_of(torch.from_numpy(lengths))
        bags[f"f{number}"] = Bags(torch.from_numpy(values), offsets, rows)
    labels = generator.random(examples) < 1 / (1 + np.exp(-logits))
    return Examples(bags, torch.empty(examples, 0), torch.from_numpy(labels).float())
