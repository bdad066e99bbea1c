"""Twins: a module of ours and its FBGEMM counterpart, trained side by side and compared."""

from torchrec_ext.twin.bare import BareTwin
from torchrec_ext.twin.compare import Difference, largest, table_of
from torchrec_ext.twin.description import Batch, Description, NoCounterpartError, Table
from torchrec_ext.twin.sharded import ShardedTwin

__all__ = [
    "BareTwin",
    "Batch",
    "Description",
    "Difference",
    "NoCounterpartError",
    "ShardedTwin",
    "Table",
    "largest",
    "table_of",
]
