"""Data sets of the train command, all held in memory and split by time."""

from torchrec_ext.train.data.examples import Bags, Batch, Examples, RankSlices, stable_hash
from torchrec_ext.train.data.load import Split, load, split_by_time

__all__ = [
    "Bags",
    "Batch",
    "Examples",
    "RankSlices",
    "Split",
    "load",
    "split_by_time",
    "stable_hash",
]
