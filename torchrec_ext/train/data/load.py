"""From the ``data`` section of a configuration to training and held-out examples."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from torchrec_ext.command.errors import UserError
from torchrec_ext.train.config import CriteoData, DataConfig, MovieLensData, SyntheticData
from torchrec_ext.train.data.criteo import load_criteo
from torchrec_ext.train.data.examples import Examples
from torchrec_ext.train.data.movielens import load_movielens
from torchrec_ext.train.data.synthetic import load_synthetic


@dataclass(frozen=True)
class Split:
    """Examples to train on and later ones to evaluate on.

    Attributes:
        train: The earlier examples.
        held_out: The later ones: the test part, or the end of the training part when
            ``data.evaluate_on`` is ``validation``.
    """

    train: Examples
    held_out: Examples

    def fingerprint(self) -> str:
        """Give a CRC-32 of all examples, to tell whether a run goes on with the same ones."""
        crc = zlib.crc32(repr(self.train.rows()).encode())
        for part in (self.train, self.held_out):
            tensors = [part.dense, part.labels]
            for bags in part.features.values():
                tensors += [bags.offsets, bags.values[bags.offsets[0] : bags.offsets[-1]]]
            for tensor in tensors:
                crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
        return f"{crc:08x}"


def load(config: DataConfig) -> Split:
    """Read the data set that ``config`` names and split it by time.

    Raises:
        UserError: If the data is missing, malformed or too small to split.
    """
    return split_by_time(_read(config), config.test_fraction, config.evaluate_on)


def split_by_time(examples: Examples, test_fraction: float, evaluate_on: str) -> Split:
    """Hold out the latest examples.

    Args:
        examples: All examples, oldest first.
        test_fraction: Share of the test part, between 0 and 1.
        evaluate_on: ``test``, or ``validation`` to leave the test part alone and hold out the
            last ``test_fraction`` of the training part instead (for choosing hyperparameters).

    Raises:
        UserError: If a part would be empty.
    """
    stop = len(examples)
    cut = stop - round(stop * test_fraction)
    if evaluate_on == "validation":
        stop, cut = cut, cut - round(cut * test_fraction)
    if cut < 1 or cut >= stop:
        raise UserError(
            f"data.test_fraction {test_fraction} leaves a part of the {len(examples)} examples "
            "empty; choose another fraction or more examples"
        )
    return Split(examples.slice(0, cut), examples.slice(cut, stop))


def _read(config: DataConfig) -> Examples:
    match config:
        case MovieLensData():
            return load_movielens(config.path)
        case CriteoData():
            return load_criteo(config.path, config.rows_per_feature, config.max_examples)
        case SyntheticData():
            return load_synthetic(
                examples=config.examples,
                features=config.features,
                rows=config.rows,
                bag=config.bag,
                zipf=config.zipf,
                informative=config.informative,
                seed=config.seed,
            )
