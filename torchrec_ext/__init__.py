"""Fused optimizers for the embedding tables of TorchRec, written in C++.

Importing this package imports neither FBGEMM nor TorchRec; ``install()``, the sharders in
``torchrec_ext.distributed`` and the module in ``torchrec_ext.tbe`` do.
"""

from torchrec_ext.optim_type import OptimType

__all__ = ["OptimType", "__version__", "install", "uninstall"]

__version__ = "0.1.0"


def install() -> None:
    """Lets TorchRec build our kernels for tables whose optimizer is an ``OptimType``.

    TorchRec's planner then counts the memory of their states. Everything else keeps TorchRec's own
    kernels and estimates. FBGEMM's op for ``use_index_dedup`` gets a CPU kernel where it has none.
    Calling it twice changes nothing.

    Raises:
        UnsupportedTorchRecError: The installed TorchRec is not one whose internals are known.
        RuntimeError: A function was wrapped again after ``install()`` without ``functools.wraps``.
    """
    from torchrec_ext.distributed import hook

    hook.install()


def uninstall() -> None:
    """Puts TorchRec's own functions back; modules that are already sharded keep working.

    The CPU kernel for ``use_index_dedup`` stays, for their sake.

    Raises:
        RuntimeError: Another package wrapped the same functions after ``install()``.
    """
    from torchrec_ext.distributed import hook

    hook.uninstall()
