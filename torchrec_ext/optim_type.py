"""The optimizers that torchrec_ext brings, as an enum of its own."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  the extension resolves its symbols in libtorch, which this loads

from torchrec_ext._C import OptimType

OptimType.__doc__ = """A fused optimizer of torchrec_ext.

Members have FBGEMM's names and value strings where FBGEMM has the optimizer too. No member equals a
member of FBGEMM's ``EmbOptimType``; ``counterpart`` is that member, or None where the installed
FBGEMM has none.

Example:
    >>> from torchrec_ext import OptimType
    >>> OptimType.FTRL.value
    'ftrl'
    >>> OptimType.EXACT_SGD.counterpart
    <EmbOptimType.EXACT_SGD: 'exact_sgd'>
"""


def _counterpart(optimizer: OptimType) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return getattr(EmbOptimType, optimizer.name, None)


def _value(optimizer: OptimType) -> str:
    return str(optimizer.value)


# C++ makes the enum's members; what needs Python is added here.
OptimType.counterpart = property(_counterpart)  # type: ignore[method-assign,assignment]
OptimType.__str__ = _value  # type: ignore[method-assign,assignment]

#: The members in the order of the ops' ``optimizer`` argument.
OPTIM_TYPES: tuple[OptimType, ...] = tuple(OptimType)

__all__ = ["OPTIM_TYPES", "OptimType"]
