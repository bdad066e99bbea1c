"""Wraps functions of another package so that it can be undone, and only when they are known."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class UnsupportedTorchRecError(RuntimeError):
    """The installed TorchRec is not one whose internals the hook knows."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """A function of TorchRec that the hook wraps.

    Attributes:
        owner: The class or module that defines it; a module's function is wrapped for those who
            look it up there when they call it.
        name: Its name there.
        parameters: The parameters it must have, in order.
        wrap: Makes our function around TorchRec's.
    """

    owner: type | ModuleType
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Function], Function]

    @property
    def path(self) -> str:
        """The function's full name."""
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.name}"

    def current(self) -> Any:
        """What the owner holds now: a function or a classmethod; None if it has no such name."""
        return vars(self.owner).get(self.name)


# What TorchRec had and what we put there, by the function's path.
_installed: dict[str, tuple[Any, Any]] = {}


def wrap(seams: Sequence[Seam]) -> None:
    """Wraps the functions that are not wrapped yet.

    Raises:
        UnsupportedTorchRecError: A function is missing or has other parameters than those known.
            Nothing was changed.
        RuntimeError: Someone else wrapped a function after ours, without saying so: ours may be
            inside. Nothing was changed.
    """
    missing = [seam for seam in seams if not in_place(seam)]
    for seam in missing:
        _check_not_hidden(seam)
        _check_signature(seam)
    for seam in missing:
        original = seam.current()
        wrapper: Any
        if isinstance(original, classmethod):
            wrapper = classmethod(seam.wrap(original.__func__))
        else:
            wrapper = seam.wrap(original)
        setattr(seam.owner, seam.name, wrapper)
        _installed[seam.path] = (original, wrapper)


def unwrap(seams: Sequence[Seam]) -> None:
    """Puts the original functions back.

    Raises:
        RuntimeError: A function was wrapped again by someone else. Nothing was changed.
    """
    for seam in seams:
        if not in_place(seam):
            _check_not_hidden(seam)
    wrapped = [seam for seam in seams if in_place(seam)]
    for seam in wrapped:
        if seam.current() is not _installed[seam.path][1]:
            raise RuntimeError(
                f"{seam.path} was wrapped by someone else after torchrec_ext.install(); "
                "take that wrapper off first, then call torchrec_ext.uninstall()"
            )
    for seam in wrapped:
        setattr(seam.owner, seam.name, _installed[seam.path][0])
    for seam in seams:
        _installed.pop(seam.path, None)


def in_place(seam: Seam) -> bool:
    """Whether our wrapper is part of what the owner holds now, outermost or further in."""
    if seam.path not in _installed:
        return False
    ours = _function(_installed[seam.path][1])
    return any(function is ours for function in _layers(_function(seam.current())))


def _function(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, classmethod) else attribute


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _check_not_hidden(seam: Seam) -> None:
    """Where ours was put, TorchRec's own function or the one before ours may be, no third one."""
    function = _function(seam.current())
    if function is None or seam.path not in _installed:
        return
    owner = "" if isinstance(seam.owner, ModuleType) else f"{seam.owner.__qualname__}."
    name = getattr(function, "__qualname__", repr(function))
    if function is not _function(_installed[seam.path][0]) and name != owner + seam.name:
        raise RuntimeError(
            f"{seam.path} was replaced by {name} after torchrec_ext.install(), which may call "
            "ours; take it off, or put functools.wraps on it"
        )


def _check_signature(seam: Seam) -> None:
    function = _function(seam.current())
    found = None if function is None else tuple(inspect.signature(function).parameters)
    if found == seam.parameters:
        return
    state = "does not exist" if found is None else f"takes ({', '.join(found)})"
    package = seam.path.partition(".")[0]
    raise UnsupportedTorchRecError(
        f"torchrec_ext does not know {package} {importlib.metadata.version(package)}: "
        f"{seam.path} {state}, expected ({', '.join(seam.parameters)}) as with TorchRec 1.8 and "
        "1.9; install one of these or a newer torchrec_ext"
    )
