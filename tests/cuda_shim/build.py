"""Compiles CUDA sources with g++ and the shim into shared libraries that run on the CPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Literal

Variant = Literal["plain", "sanitized", "race"]

SHIM = Path(__file__).resolve().parent
BUILD = SHIM.parents[1] / "build" / "cuda_shim"
DETECTOR = "race_*.cpp"

# -O1: -O2 takes about 40% longer for a kernel file, and tests of small grids spend more time on
# compilation than on runs. No contraction, or the bits would not be those of nvcc's -fmad=false.
COMMON_FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
WARNINGS = ("-Wall", "-Wextra")
# Checks make code so large that optimization takes three times as long as all the rest.
SANITIZED_OPTIMIZATION = ("-O0",)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# gcc leaves calls of these to libtsan's interceptors. The detector has functions in their place.
NOT_INSTRUMENTED = ("memcpy", "memmove", "memset")


def build_library(
    name: str,
    sources: Sequence[Path],
    *,
    flags: Sequence[str] = (),
    variant: Variant = "plain",
    include: Sequence[Path] = (),
    link: Sequence[str] = (),
) -> Path:
    """Compiles the sources and the shim, and links them; what is up to date is not built again.

    Args:
        name: of the library, without prefix and suffix.
        sources: C++ files; ``.cu`` files are compiled as C++.
        flags: for the sources, after the common ones.
        variant: ``plain``; ``sanitized`` with AddressSanitizer and UBSan, to be loaded in a process
            that has ``sanitizer_environment()``; ``race`` with the race detector.
        include: folders, searched after the shim's.
        link: further arguments for the linker.

    Returns:
        The shared library, in ``build/cuda_shim``. Other contents have another path.

    Raises:
        RuntimeError: a source does not compile, or the library does not link.
    """
    shim = sorted(SHIM.glob("shim_*.cpp"))
    shim_flags = [*COMMON_FLAGS, *WARNINGS, f"-I{SHIM}"]
    # What g++ does not know is nvcc's `#pragma unroll`.
    source_flags = [*COMMON_FLAGS, *WARNINGS, "-Wno-unknown-pragmas", f"-I{SHIM}"]
    source_flags += [f"-I{path}" for path in include]
    link_flags: list[str] = []
    if variant == "sanitized":
        shim_flags += SANITIZERS
        source_flags += [*SANITIZERS, *SANITIZED_OPTIMIZATION]
        link_flags += SANITIZERS
    elif variant == "race":
        shim += sorted(SHIM.glob(DETECTOR))
        # Not for the shim: only what kernels read and write counts. Nor for the linker, which would
        # add libtsan.
        source_flags.append("-fsanitize=thread")
    source_flags += flags
    link_flags += link
    # The shim first: of an inline function that both have, the linker takes the first one's copy,
    # and an instrumented one would call back into the detector.
    jobs = [(path, shim_flags) for path in shim] + [(path, source_flags) for path in sources]
    with ThreadPoolExecutor(_jobs()) as pool:
        objects = list(pool.map(lambda job: _compile(*job), jobs))
    return _link(f"{name}-{variant}", objects, link_flags)


def sanitizer_environment() -> dict[str, str]:
    """Environment variables for a process that loads a sanitized library.

    The sanitizer must be there first, and Python does not bring it. The C++ library comes with it,
    because the sanitizer looks for ``__cxa_throw`` when it starts. Python leaks by design.
    """
    libraries = (_file_of("libasan.so"), _file_of("libstdc++.so"))
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _jobs() -> int:
    return max(1, min(2, int(os.environ.get("MAX_JOBS", "2"))))


@cache
def _compiler_version(compiler: str) -> str:
    return _run([compiler, "--version"]).decode()


@cache
def _file_of(library: str) -> str:
    return _run([_compiler(), f"-print-file-name={library}"]).decode().strip()


def _run(command: Sequence[str], standard_input: bytes = b"") -> bytes:
    done = subprocess.run(command, input=standard_input, capture_output=True)
    if done.returncode != 0:
        text = " ".join(command)
        raise RuntimeError(f"{text} ended with {done.returncode}:\n{done.stderr.decode()}")
    return done.stdout


def _compile(source: Path, flags: Sequence[str]) -> Path:
    compiler = _compiler()
    text = _run([compiler, *flags, "-E", "-x", "c++", str(source)])
    key = _digest(_compiler_version(compiler).encode(), *(flag.encode() for flag in flags), text)
    commands = [[compiler, *flags, "-c", "-x", "c++-cpp-output", "-", "-o"]]
    if "-fsanitize=thread" in flags:
        commands.append(
            ["objcopy", *(f"--redefine-sym={f}=cuda_shim_{f}" for f in NOT_INSTRUMENTED)]
        )
    return _make(BUILD / "objects" / f"{source.stem}-{key}.o", commands, standard_input=text)


def _link(name: str, objects: Sequence[Path], flags: Sequence[str]) -> Path:
    compiler = _compiler()
    arguments = [*map(str, objects), *flags]
    key = _digest(_compiler_version(compiler).encode(), *(text.encode() for text in arguments))
    target = BUILD / f"{name}-{key}.so"
    return _make(target, [[compiler, "-shared", *arguments, "-o"]])


def _make(target: Path, commands: Sequence[Sequence[str]], standard_input: bytes = b"") -> Path:
    """Runs commands, whose last argument is to be the target, where there is none yet."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, whoever else builds the same.
    part = target.with_name(f"{target.name}.{os.getpid()}-{get_ident()}.part")
    try:
        for command in commands:
            _run([*command, str(part)], standard_input)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:20]
