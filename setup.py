"""Builds the C++ extension ``torchrec_ext._C``; pyproject.toml holds the rest.

With ``USE_CUDA=1`` also the library ``torchrec_ext/_cuda.so`` with the CUDA kernels.

Environment: ``CXX`` (default ``g++``), ``CXXFLAGS`` (appended to ours), ``MAX_JOBS``, ``USE_CUDA``,
``NVCC`` (default ``nvcc``), ``CUDA_ARCHITECTURES`` (default ``80;90;100``; PTX for the last goes
with them).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# LibTorch's stable ABI as of 2.11: one binary serves that version and every later one.
OLDEST_TORCH = (2, 11)
TORCH_TARGET_VERSION = "0x020b000000000000"

# Contraction to fma would give an update different bits on different instruction sets. gcc
# vectorises sqrt only without errno, and a conditional division only without trapping math; neither
# changes a value.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Wdouble-promotion",
    "-Werror",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
]

# nvcc's division, square root and subnormals are IEEE's already; only contraction is switched
# off.
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "--fmad=false",
    "--expt-relaxed-constexpr",
    "--Werror",
    "all-warnings",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra",
    "-DUSE_CUDA",  # LibTorch's headers then declare its CUDA functions
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
]


def package_folder(name: str) -> Path:
    """The folder of an installed package that the build needs, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"torchrec_ext: building needs the Python package {name!r}, which is not installed. "
            "Without build isolation, install first: torch pybind11 ninja setuptools wheel"
        )
    return Path(spec.submodule_search_locations[0])


def torch_folder() -> Path:
    """The folder of torch, whose version must have the stable ABI that we compile against."""
    folder = package_folder("torch")
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        raise SystemExit(f"torchrec_ext: torch {version} is too old, 2.11 or later is needed")
    return folder


def compiler() -> str:
    """The C++ compiler command."""
    command = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(command)[0]) is None:
        raise SystemExit(
            f"torchrec_ext: no C++ compiler {command!r}; install g++ 11 or later, or set CXX"
        )
    return command


def uses_cuda() -> bool:
    """Whether the CUDA kernels are built too."""
    return os.environ.get("USE_CUDA", "0") not in ("", "0")


def cuda_compiler() -> str:
    """The nvcc command, with the architectures to compile for."""
    command = os.environ.get("NVCC", "nvcc")
    if shutil.which(shlex.split(command)[0]) is None:
        raise SystemExit(
            f"torchrec_ext: USE_CUDA is set, but there is no CUDA compiler {command!r}; install "
            "CUDA 13, or set NVCC"
        )
    architectures = os.environ.get("CUDA_ARCHITECTURES", "80;90;100").split(";")
    codes = [f"arch=compute_{each},code=sm_{each}" for each in architectures]
    codes.append(f"arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    flags = " ".join(f"-gencode {code}" for code in codes)
    return f"{command} -ccbin {shlex.quote(shlex.split(compiler())[0])} {flags}"


def cuda_toolkit() -> Path:
    """The folder of CUDA's headers and libraries, as nvcc itself names it."""
    command = [*shlex.split(os.environ.get("NVCC", "nvcc")), "-v", "--dryrun", "-x", "cu", "-"]
    report = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    for line in report.stderr.splitlines():
        if line.startswith("#$ TOP="):
            return Path(line.removeprefix("#$ TOP=")).resolve()
    raise SystemExit(f"torchrec_ext: {shlex.join(command)} does not name CUDA's folder")


def check_cuda_torch() -> None:
    """Checks that the kernels can be linked: they need LibTorch's CUDA half."""
    if not (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise SystemExit(
            f"torchrec_ext: USE_CUDA is set, but torch {importlib.metadata.version('torch')} is a "
            "build without CUDA; install one with CUDA and build with --no-build-isolation"
        )


def python_include() -> Path:
    """The folder of Python.h."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").exists():
        raise SystemExit(
            f"torchrec_ext: {folder} has no Python.h; install Python's development headers "
            f"(python{sys.version_info[0]}.{sys.version_info[1]}-dev or -devel)"
        )
    return folder


def ninja_escape(text: str) -> str:
    """A path as ninja's build statements take it."""
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_flags(parts: list[str]) -> str:
    """Arguments of a command as ninja's variables take them."""
    return shlex.join(parts).replace("$", "$$")


def ninja_file(sources: list[str], objects: Path, library: Path) -> str:
    """The build as a ninja file: every source to an object, all objects to one shared library."""
    torch = torch_folder()
    cuda = any(source.endswith(".cu") for source in sources)
    # Third-party headers as system headers, so that -Werror is about our own code.
    folders = [torch / "include", package_folder("pybind11") / "include", python_include()]
    includes = [part for folder in folders for part in ("-isystem", str(folder))]
    own_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    # The wheel stands next to torch in site-packages, wherever that is.
    rpath = "-Wl,-rpath,$ORIGIN/../torch/lib"
    link = ["-L" + str(torch / "lib"), "-ltorch_cpu", rpath]
    if cuda:
        cuda_folder = cuda_toolkit()
        includes += ["-isystem", str(cuda_folder / "include")]
        link = ["-ltorch_cuda", "-L" + str(cuda_folder / "lib64"), "-lcudart", *link]
    lines = [
        f"builddir = {ninja_escape(str(objects))}",
        f"cxx = {compiler()}",
        f"flags = {ninja_flags(COMPILE_FLAGS + includes + own_flags)}",
        f"link_flags = {ninja_flags(link)}",
        "rule compile",
        "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        "  command = $cxx -shared -o $out $in $link_flags",
        "  description = link $out",
    ]
    if cuda:
        lines += [
            f"nvcc = {cuda_compiler()}",
            f"nvcc_flags = {ninja_flags(NVCC_FLAGS + includes)}",
            "rule compile_cuda",
            "  command = $nvcc $nvcc_flags -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $in",
        ]
    outputs = []
    for source in sources:
        rule = "compile_cuda" if source.endswith(".cu") else "compile"
        outputs.append(ninja_escape(str(objects / (source + ".o"))))
        lines.append(f"build {outputs[-1]}: {rule} {ninja_escape(source)}")
    lines.append(f"build {ninja_escape(str(library))}: link {' '.join(outputs)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Compiles in parallel and only what changed, with our flags instead of Python's own."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension; its objects stay in ``build/`` for the next build."""
        # Relative to ROOT, because messages carry the sources' paths as the compiler saw them.
        name = ext.name.rpartition(".")[2]
        folder = Path("build", f"ninja-{sys.implementation.cache_tag}{name}")
        library = folder / Path(self.get_ext_filename(ext.name)).name
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
        (ROOT / folder / "build.ninja").write_text(ninja_file(ext.sources, folder, library))
        package_folder("ninja")
        command = [sys.executable, "-m", "ninja", "-f", str(folder / "build.ninja")]
        if "MAX_JOBS" in os.environ:
            command += ["-j", os.environ["MAX_JOBS"]]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise SystemExit(
                "torchrec_ext: compiling the C++ extension failed, see the messages above"
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(ROOT / library), str(target))

    def get_ext_filename(self, fullname: str) -> str:
        """The CUDA kernels are no Python module but a library that torch loads."""
        if fullname.endswith("_cuda"):
            return str(Path(*fullname.split("."))) + ".so"
        return super().get_ext_filename(fullname)


def find(*patterns: str) -> list[str]:
    """Files below ROOT, relative to it, in a fixed order."""
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


def extensions() -> list[Extension]:
    """What is to be built."""
    headers = find("csrc/**/*.h")
    sources = find("csrc/*.cpp", "csrc/cpu/*.cpp")
    result = [Extension("torchrec_ext._C", sources=sources, depends=headers)]
    if uses_cuda():
        check_cuda_torch()
        sources = find("csrc/cuda/*.cpp", "csrc/cuda/*.cu")
        result.append(Extension("torchrec_ext._cuda", sources=sources, depends=headers))
    return result


if __name__ == "__main__":  # tools/check_cuda imports the flags
    setup(ext_modules=extensions(), cmdclass={"build_ext": NinjaBuild})
