"""Lets ``copy.deepcopy`` of a parameter keep the optimizers that were applied to it.

torch's copies of a parameter drop its attributes, so that the copy of a model whose tables were
given classes of ``torchrec_ext.optim`` would be trained by FBGEMM's SGD, without a word.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def keep_optimizers_in_copies(parameter: torch.Tensor) -> None:
    """Makes copies of a parameter have its applied optimizers, with their settings and states.

    Nothing changes for a parameter without an optimizer from ``_apply_optimizer_in_backward``.
    """
    if isinstance(parameter, torch.nn.Parameter):
        parameter.__deepcopy__ = _Copier(parameter)  # type: ignore[method-assign]


class _Copier:
    """A parameter's ``__deepcopy__``.

    The reference to the parameter is a strong one: pickle then drops this attribute, as it drops
    the optimizers.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter: Any = parameter

    def __call__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        parameter = self._parameter
        known = id(parameter) in memo
        copied = type(parameter).__deepcopy__(parameter, memo)
        if not known and hasattr(parameter, "_optimizer_classes"):
            _apply_to_copy(parameter, copied)
        return copied


def _apply_to_copy(parameter: Any, copied: Any) -> None:
    # Half a second to import, and whoever applied an optimizer has imported it.
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    steps_in_backward = parameter in param_to_optim_hook_handle_map
    for optimizer_class, keywords in zip(
        parameter._optimizer_classes, parameter._optimizer_kwargs, strict=True
    ):
        _apply_optimizer_in_backward(
            optimizer_class, [copied], copy.deepcopy(keywords), register_hook=steps_in_backward
        )
    for original, own in zip(
        parameter._in_backward_optimizers, copied._in_backward_optimizers, strict=True
    ):
        own.load_state_dict(copy.deepcopy(original.state_dict()))
