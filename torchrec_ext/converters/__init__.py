"""FTRL's states and hyperparameters in the form of other libraries, and back.

``from_<library>`` gives the states ``{"linear", "accum"}`` and the hyperparameters of
``OptimType.FTRL``, ``to_<library>`` the other library's. Nothing here needs the other library:
arrays come in as numpy arrays or tensors and go out as tensors.
:func:`torchrec_ext.converters.tables.load_table` writes converted weights and states into a table,
sharded or not, and ``read_table`` reads them.

docs/converters.md has the names and factors of every library, and an example.
"""

from torchrec_ext.converters.dynamicemb import from_dynamicemb, to_dynamicemb
from torchrec_ext.converters.hugectr import from_hugectr, to_hugectr
from torchrec_ext.converters.states import seed_new_rows
from torchrec_ext.converters.tensorflow import (
    from_tensorflow,
    to_tensorflow,
    to_tensorflow_op,
)
from torchrec_ext.converters.vowpal_wabbit import from_vowpal_wabbit, to_vowpal_wabbit

__all__ = [
    "from_dynamicemb",
    "from_hugectr",
    "from_tensorflow",
    "from_vowpal_wabbit",
    "seed_new_rows",
    "to_dynamicemb",
    "to_hugectr",
    "to_tensorflow",
    "to_tensorflow_op",
    "to_vowpal_wabbit",
]
