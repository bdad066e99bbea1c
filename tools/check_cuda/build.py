"""Compiles and links the CUDA half, and keeps what the checks read: ptxas' reports and the PTX."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("build", "check_cuda")
ARCHITECTURES = ("80", "90")
# All that is instantiated of CUB is in here; its kernels are not ours to judge.
CUB_SOURCES = ("csrc/cuda/sort.cu",)


@dataclass(frozen=True)
class Unit:
    """A compiled ``.cu`` file.

    Attributes:
        source: Its path below ROOT.
        log: What nvcc and ptxas said.
        ptx: The PTX that ptxas made machine code from, one file for each architecture.
    """

    source: str
    log: Path
    ptx: tuple[Path, ...]

    @property
    def is_ours(self) -> bool:
        """Whether its kernels are ours rather than CUB's."""
        return self.source not in CUB_SOURCES


def load_setup() -> ModuleType:
    """``setup.py`` as a module, with its flags and functions."""
    specification = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def include_flags(setup: ModuleType) -> list[str]:
    """The folders of headers that are not ours."""
    folders = [setup.torch_folder() / "include", setup.cuda_toolkit() / "include"]
    return [part for folder in folders for part in ("-isystem", str(folder))]


def kept_folder(source: str) -> Path:
    """Where the PTX of a source is kept."""
    return FOLDER / (source + ".keep")


def ninja_file(setup: ModuleType, sources: list[str], library: Path) -> str:
    """The build as a ninja file: every source to an object, all objects to one library."""
    nvcc = shlex.split(os.environ.get("NVCC", "nvcc"))
    nvcc += ["-ccbin", shlex.split(setup.compiler())[0]]
    for each in ARCHITECTURES:
        nvcc += ["-gencode", f"arch=compute_{each},code=sm_{each}"]
    nvcc += [*setup.NVCC_FLAGS, "-Xptxas", "-v", *include_flags(setup)]
    flags = [*setup.COMPILE_FLAGS, *include_flags(setup)]
    link_flags = [f"-L{setup.cuda_toolkit() / 'lib64'}", "-lcudart"]
    lines = [
        f"builddir = {setup.ninja_escape(str(FOLDER))}",
        f"nvcc = {setup.ninja_flags(nvcc)}",
        f"cxx = {setup.compiler()} {setup.ninja_flags(flags)}",
        # The rest of what nvcc keeps is large, and of no use.
        "rule compile_cuda",
        "  command = rm -rf $keep $out && mkdir -p $keep && "
        "{ $nvcc --keep --keep-dir $keep -MD -MF $out.d -c $in -o $out >$out.log 2>&1 || "
        "{ grep -vE '^ptxas info|bytes stack frame' $out.log; exit 1; }; } && "
        "find $keep -type f ! -name '*.ptx' -delete",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule compile",
        "  command = rm -f $out && $cxx -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        f"  command = {setup.compiler()} -shared -o $out $in {setup.ninja_flags(link_flags)}",
        "  description = link $out",
    ]
    outputs = []
    for source in sources:
        outputs.append(setup.ninja_escape(str(FOLDER / (source + ".o"))))
        rule = "compile_cuda" if source.endswith(".cu") else "compile"
        lines.append(f"build {outputs[-1]}: {rule} {setup.ninja_escape(source)}")
        lines.append(f"  keep = {setup.ninja_escape(str(kept_folder(source)))}")
    lines.append(f"build {setup.ninja_escape(str(library))}: link {' '.join(outputs)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Built:
    """What a build left.

    Attributes:
        units: What nvcc compiled.
        library: The library of all objects; None where one is missing. Torch's symbols are
            undefined in it: torch may be a build without CUDA.
        faults: What did not compile.
    """

    units: list[Unit]
    library: Path | None
    faults: list[str]


def _unit(source: str) -> Unit:
    ptx = sorted((ROOT / kept_folder(source)).glob("*.ptx"))
    return Unit(source, ROOT / FOLDER / (source + ".o.log"), tuple(ptx))


def build(setup: ModuleType) -> Built:
    """Compiles what changed, and goes on with the rest where something does not compile."""
    nvcc = shlex.split(os.environ.get("NVCC", "nvcc"))[0]
    if shutil.which(nvcc) is None:
        raise SystemExit(f"check-cuda: no CUDA compiler {nvcc!r}; install CUDA 13, or set NVCC")
    sources = setup.find("csrc/cuda/*.cpp", "csrc/cuda/*.cu")
    library = FOLDER / "_cuda.so"
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    (ROOT / FOLDER / "build.ninja").write_text(ninja_file(setup, sources, library))
    command = [sys.executable, "-m", "ninja", "-f", str(FOLDER / "build.ninja")]
    command += ["-k", "0", "-j", os.environ.get("MAX_JOBS", "2")]
    succeeded = subprocess.run(command, cwd=ROOT).returncode == 0
    compiled = [each for each in sources if (ROOT / FOLDER / (each + ".o")).exists()]
    faults = [f"{each} does not compile" for each in sources if each not in compiled]
    if not succeeded and not faults:
        faults.append("the objects cannot be linked")
    units = [_unit(source) for source in compiled if source.endswith(".cu")]
    return Built(units, ROOT / library if succeeded else None, faults)
