"""Builds the C++ extension ``torchrec_ext._C``; pyproject.toml holds the rest.

Environment: ``CXX`` (default ``g++``), ``CXXFLAGS`` (appended to ours), ``MAX_JOBS``, ``USE_CUDA``.
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


def ninja_file(sources: list[str], objects: Path, library: Path) -> str:
    """The build as a ninja file: every source to an object, all objects to one shared library."""
    torch = torch_folder()
    includes = [
        torch / "include",
        package_folder("pybind11") / "include",
        python_include(),
    ]
    # Third-party headers as system headers, so that -Werror is about our own code.
    flags = COMPILE_FLAGS + [part for folder in includes for part in ("-isystem", str(folder))]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    # The wheel stands next to torch in site-packages, wherever that is.
    link = ["-L" + str(torch / "lib"), "-ltorch_cpu", "-Wl,-rpath,$ORIGIN/../torch/lib"]
    lines = [
        f"builddir = {ninja_escape(str(objects))}",
        f"cxx = {compiler()}",
        f"flags = {shlex.join(flags).replace('$', '$$')}",
        f"link_flags = {shlex.join(link).replace('$', '$$')}",
        "rule compile",
        "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        "  command = $cxx -shared -o $out $in $link_flags",
        "  description = link $out",
    ]
    outputs = []
    for source in sources:
        output = ninja_escape(str(objects / Path(source).with_suffix(".o")))
        outputs.append(output)
        lines.append(f"build {output}: compile {ninja_escape(source)}")
    lines.append(f"build {ninja_escape(str(library))}: link {' '.join(outputs)}")
    return "\n".join(lines) + "\n"


class NinjaBuild(build_ext):
    """Compiles in parallel and only what changed, with our flags instead of Python's own."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension; its objects stay in ``build/`` for the next build."""
        # Relative to ROOT, because messages carry the sources' paths as the compiler saw them.
        folder = Path("build", "ninja-" + sys.implementation.cache_tag)
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


def find(*patterns: str) -> list[str]:
    """Files below ROOT, relative to it, in a fixed order."""
    return sorted(
        str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)
    )


if os.environ.get("USE_CUDA", "0") not in ("", "0"):
    raise SystemExit(
        "torchrec_ext: USE_CUDA is set, but this version has no CUDA kernels; "
        "unset it to build the CPU kernels"
    )

setup(
    ext_modules=[
        Extension(
            "torchrec_ext._C",
            sources=find("csrc/*.cpp", "csrc/cpu/*.cpp"),
            depends=find("csrc/**/*.h"),
        )
    ],
    cmdclass={"build_ext": NinjaBuild},
)
