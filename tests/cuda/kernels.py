"""The CUDA kernels and their launches, compiled by g++ and run on the CPU by the shim."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from torchrec_ext import cuda, ops

from ..cuda_shim import library
from ..cuda_shim.build import Variant, build_library

ROOT = Path(__file__).resolve().parents[2]
SEAMS = ROOT / "tests" / "cuda" / "seams"
TORCH = Path(torch.__file__).parent
# What the shim has in place of CUB, of CUDA's streams and of the registration for CUDA tensors.
REPLACED = {"sort.cu", "queue.cu", "register.cpp"}
FLAGS = (
    "-isystem",
    str(TORCH / "include"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-fno-strict-aliasing",  # as nvcc; kernels read four columns as one vector
)


def sources() -> list[Path]:
    """The files that nvcc compiles, but for those that have a replacement, and the replacements."""
    folder = ROOT / "csrc" / "cuda"
    own = [path for kind in ("*.cu", "*.cpp") for path in sorted(folder.glob(kind))]
    return [path for path in own if path.name not in REPLACED] + sorted(SEAMS.glob("*.cpp"))


@cache
def build(variant: Variant = "plain") -> Path:
    """Builds the library of ops ``torchrec_ext_cuda_shim``."""
    return build_library(
        "torchrec_ext_cuda",
        sources(),
        variant=variant,
        include=[ROOT / "csrc"],
        flags=FLAGS,
        link=[f"-L{TORCH / 'lib'}", "-ltorch_cpu"],
    )


@cache
def load(variant: Variant = "plain") -> ctypes.CDLL:
    """Loads the library; its control functions are those of ``shim_control.h``.

    A process can load one variant only, because each registers the same ops.
    """
    path = build(variant)
    torch.ops.load_library(str(path))
    _loaded.append(variant)
    return library.load(path)


_loaded: list[Variant] = []


def loaded() -> ctypes.CDLL:
    """The library that this process has loaded; loads the plain one where there is none."""
    return load(_loaded[0] if _loaded else "plain")


@contextmanager
def in_place_of_the_cpu_kernels() -> Iterator[None]:
    """Lets ``torchrec_ext.ops`` call the CUDA kernels, with tensors on the CPU."""
    loaded()
    shim = torch.ops.torchrec_ext_cuda_shim
    both = SimpleNamespace(
        fused_update=shim.fused_update,
        per_sample_weight_grad=shim.per_sample_weight_grad,
        lookup=shim.lookup,
        device_layout=torch.ops.torchrec_ext.device_layout,
        sort_lookups=torch.ops.torchrec_ext.sort_lookups,
        catch_up=torch.ops.torchrec_ext.catch_up,
    )
    with (
        mock.patch.object(ops, "_LIBRARY", both),
        mock.patch.object(ops, "_is_on_device", lambda _: True),
        mock.patch.object(cuda, "check_available", lambda _: None),
    ):
        yield


_OF_THE_CPU = (
    (ops, "_LIBRARY", ops._LIBRARY),
    (ops, "_is_on_device", ops._is_on_device),
    (cuda, "check_available", cuda.check_available),
)


@contextmanager
def those_of(module: torch.nn.Module) -> Iterator[None]:
    """Within ``in_place_of_the_cpu_kernels``: a module on the CPU has the CPU's kernels again."""
    with ExitStack() as stack:
        for owner, name, own in _OF_THE_CPU if module.use_cpu else ():
            stack.enter_context(mock.patch.object(owner, name, own))
        yield
