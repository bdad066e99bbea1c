"""Names of kernels, as a person reads them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

_NAMESPACE = re.compile(r"(?:\(anonymous namespace\)|\w+)::")


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    """The C++ name of each symbol, without parameters and result."""
    ordered = sorted(set(symbols))
    run = subprocess.run(
        ["c++filt", "-p"], input="\n".join(ordered), capture_output=True, text=True, check=True
    )
    return dict(zip(ordered, run.stdout.splitlines(), strict=True))


def shorten(name: str) -> str:
    """A kernel's name without namespaces: ``update_rows<Ftrl<true>, NearestRounding<float>>``."""
    name = _NAMESPACE.sub("", name).replace("> >", ">>").replace("> >", ">>")
    return re.sub(r"_kernel\b", "", name)


def template_arguments(name: str) -> list[str]:
    """The outermost template arguments of a C++ name."""
    arguments: list[str] = []
    depth = 0
    for character in name:
        depth -= character == ">"
        if depth == 1 and character == ",":
            arguments.append("")
        elif depth > 0:
            arguments[-1] += character
        elif character == "<":
            arguments.append("")
        depth += character == "<"
    return [argument.strip() for argument in arguments]
