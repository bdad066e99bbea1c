"""Runs all checks: ``python -m tools.check_cuda``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from .accesses import (
    COLUMN_KERNELS,
    States,
    access_faults,
    count_states,
    expected_accesses,
    space_faults,
)
from .build import ARCHITECTURES, Unit, build, load_setup
from .imports import cuda_calls, import_faults, undefined_symbols
from .names import demangle, shorten, template_arguments
from .ptx import Function, arithmetic_faults, count_arithmetic, parse_ptx
from .resources import Resources, parse_log, spill_faults, summary, table


def check_resources(units: Iterable[Unit]) -> list[str]:
    """Prints what kernels need and returns which of ours spill."""
    ours: list[Resources] = []
    others: list[Resources] = []
    for unit in units:
        (ours if unit.is_ours else others).extend(parse_log(unit.log.read_text()))
    demangled = demangle(each.symbol for each in ours)
    names = {symbol: shorten(name) for symbol, name in demangled.items()}
    print(table(ours, names))
    print("\nCUB's kernels, which may spill:")
    print(summary(others))
    return spill_faults(ours, names)


def check_function(function: Function, name: str, states: dict[str, States]) -> list[str]:
    """Checks one function of ours; `name` is its demangled name."""
    faults = arithmetic_faults(function) + space_faults(function)
    expected = expected_accesses(name, states)
    if expected is not None:
        faults += access_faults(function, expected)
    return faults


def unseen_kernels(unit: Unit, path: Path, functions: Iterable[Function]) -> list[str]:
    """Kernels that only the PTX or only ptxas' report has: some check overlooked them."""
    architecture = path.suffixes[-2].replace(".compute", "sm")
    reported = {
        each.symbol
        for each in parse_log(unit.log.read_text())
        if each.architecture == architecture and each.registers is not None
    }
    kernels = {function.symbol for function in functions if function.is_kernel}
    return [f"{path.name}: not all was read of {symbol}" for symbol in sorted(reported ^ kernels)]


def check_ptx(setup: ModuleType, units: Iterable[Unit]) -> list[str]:
    """Checks the PTX of all kernels of ours, on every architecture."""
    faults = []
    by_file: dict[Path, list[Function]] = {}
    for unit in units:
        if len(unit.ptx) != len(ARCHITECTURES):
            faults.append(f"{unit.source}: nvcc kept PTX for {len(unit.ptx)} architectures")
        for path in unit.ptx:
            by_file[path] = parse_ptx(path.read_text())
            faults += unseen_kernels(unit, path, by_file[path])
    functions = [function for found in by_file.values() for function in found]
    names = demangle(function.symbol for function in functions)
    for family in COLUMN_KERNELS:
        if not any(family in name for name in names.values()):
            faults.append(f"no kernel is called {family}, so that its accesses were not checked")
    optimizers = {
        template_arguments(name)[1] for name in names.values() if "update_rows_kernel<" in name
    }
    states = count_states(setup, optimizers)
    for path, found in by_file.items():
        for function in found:
            name = names[function.symbol]
            faults += [
                f"{shorten(name)} in {path.name}: {fault}"
                for fault in check_function(function, name, states)
            ]
    print(
        f"\nPTX: {len(functions)} functions with {count_arithmetic(functions)} additions, "
        "multiplications, divisions and square roots"
    )
    return faults


def check_imports(library: Path) -> list[str]:
    """Prints the library's imports from CUDA and returns what is wrong with its imports."""
    symbols = undefined_symbols(library)
    print("\nCalls of CUDA:", *cuda_calls(symbols), sep="\n  ")
    return import_faults(symbols)


def main() -> int:
    """Builds, checks and reports; returns the exit status."""
    setup = load_setup()
    built = build(setup)
    faults = built.faults + check_resources(built.units)
    faults += check_ptx(setup, [unit for unit in built.units if unit.is_ours])
    if built.library is not None:
        faults += check_imports(built.library)
    if faults:
        print(f"\ncheck-cuda failed, {len(faults)} faults:", *faults, sep="\n  ")
        return 1
    print("\nAll checks passed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
