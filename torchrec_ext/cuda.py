"""The CUDA kernels: a library of their own, which is loaded where torch has CUDA."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

HOW_TO_BUILD = (
    "with a CUDA build of torch and nvcc, build the kernels: USE_CUDA=1 pip install "
    "--no-build-isolation . (see README.md)"
)
#: The widest row that the kernels take.
MAX_DIM = 2048
_LIBRARY = Path(__file__).with_name("_cuda.so")


@cache
def load() -> str | None:
    """Loads the kernels, whether there is a device or not.

    Returns:
        Why they are not there, or None where they are.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not _LIBRARY.exists():
        return "torchrec_ext was built without CUDA"
    torch.ops.load_library(str(_LIBRARY))
    return None


def check_available(op: str) -> None:
    """Checks that an op has its CUDA kernel.

    Raises:
        RuntimeError: It has none; says how to build it.
    """
    missing = load()
    if missing is not None:
        raise RuntimeError(f"{op} got tensors on CUDA, but {missing}; {HOW_TO_BUILD}")
