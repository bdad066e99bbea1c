"""The optimizers that torchrec_ext brings, as an enum of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  the extension resolves its symbols in libtorch, which this loads

from torchrec_ext import _C

if TYPE_CHECKING:
    import enum

    class OptimType(enum.Enum):
        """A fused optimizer of torchrec_ext.

        Members have FBGEMM's names and value strings where FBGEMM has the optimizer too. No member
        equals a member of FBGEMM's ``EmbOptimType``.

        Example:
            >>> from torchrec_ext import OptimType
            >>> OptimType.FTRL.value
            'ftrl'
        """

        EXACT_SGD = "exact_sgd"
        EXACT_ADAGRAD = "exact_adagrad"
        EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
        FTRL = "ftrl"

        @property
        def counterpart(self) -> Any:
            """FBGEMM's ``EmbOptimType`` of the same name; None where the installed one has none."""

else:

    def _counterpart(self):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        return getattr(EmbOptimType, self.name, None)

    OptimType = _C.OptimType
    OptimType.counterpart = property(_counterpart)
    OptimType.__str__ = lambda self: self.value

#: The members in the order of the ops' ``optimizer`` argument.
OPTIM_TYPES: tuple[OptimType, ...] = tuple(OptimType)

__all__ = ["OPTIM_TYPES", "OptimType"]
