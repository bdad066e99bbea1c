"""Loads shared libraries that have the shim, with the functions of ``shim_control.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORWARD, REVERSE, RANDOM = range(3)

_CONTROL: dict[str, tuple[type | None, list[type]]] = {
    "shim_set_order": (None, [ctypes.c_int, ctypes.c_uint64]),
    "shim_set_multiprocessors": (None, [ctypes.c_int]),
    "shim_last_error": (ctypes.c_char_p, []),
    "shim_reset_statistics": (None, []),
    "shim_launches": (ctypes.c_uint64, []),
}
_DETECTOR: dict[str, tuple[type | None, list[type]]] = {
    "shim_race_count": (ctypes.c_uint64, []),
    "shim_race_report": (ctypes.c_char_p, []),
    "shim_watch": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]),
    "shim_bytes_read": (ctypes.c_uint64, [ctypes.c_int]),
    "shim_bytes_written": (ctypes.c_uint64, [ctypes.c_int]),
    "shim_unwatch_all": (None, []),
}


def load(path: Path) -> ctypes.CDLL:
    """Loads a library of ``build_library`` and declares its control functions."""
    library = ctypes.CDLL(str(path))
    has_detector = hasattr(library, "shim_race_count")
    for name, (result, arguments) in (_CONTROL | (_DETECTOR if has_detector else {})).items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


@contextmanager
def order(library: ctypes.CDLL, which: int, seed: int = 0) -> Iterator[None]:
    """Runs lanes, warps and blocks in this order, and forward again afterwards."""
    library.shim_set_order(which, seed)
    try:
        yield
    finally:
        library.shim_set_order(FORWARD, 0)
