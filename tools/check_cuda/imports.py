"""Checks what the library imports: nothing that makes the host wait for the device."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

# None of them waits for work on the device. All others fail, so that a call that is new here is
# looked up before it is added: cudaMemcpyAsync, for one, waits where the host's memory is pageable.
NOT_WAITING = frozenset(
    {
        "cudaDeviceGetAttribute",
        "cudaFuncGetAttributes",
        "cudaGetDevice",
        "cudaGetDeviceCount",
        "cudaGetErrorString",
        "cudaGetLastError",
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaMemsetAsync",
        "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
        "cudaPeekAtLastError",
        "cudaSetDevice",
    }
)
_CUDA = re.compile(r"(?:cuda|cu)[A-Z]\w*")


def undefined_symbols(library: Path) -> list[str]:
    """The dynamic symbols that a library expects from others, without versions."""
    command = ["nm", "-D", "--undefined-only", str(library)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({line.split()[-1].partition("@")[0] for line in report.splitlines()})


def cuda_calls(symbols: Iterable[str]) -> list[str]:
    """The functions of CUDA's runtime and driver among symbols."""
    return [symbol for symbol in symbols if _CUDA.fullmatch(symbol)]


def import_faults(symbols: Iterable[str]) -> list[str]:
    """Imports that may wait, and our own functions that nothing defines."""
    faults = []
    for symbol in symbols:
        if _CUDA.fullmatch(symbol) and symbol not in NOT_WAITING:
            faults.append(
                f"the library calls {symbol}, which is not among the functions known not to wait "
                "for the device (NOT_WAITING in tools/check_cuda/imports.py)"
            )
        elif "12torchrec_ext" in symbol:
            faults.append(f"the library calls {symbol}, which none of its sources defines")
    return faults
