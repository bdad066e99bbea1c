"""What ptxas reports about every kernel: registers, spills and memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Resources:
    """What one function needs on one architecture; sizes in bytes.

    Attributes:
        symbol: Its mangled name.
        registers: Of a thread; None for a function that kernels call, which shares theirs.
        stack: Its stack frame; that is not a spill: printf's arguments lie there, too.
        shared: Static shared memory.
    """

    symbol: str
    architecture: str
    stack: int
    spill_stores: int
    spill_loads: int
    registers: int | None = None
    shared: int = 0


def parse_log(log: str) -> list[Resources]:
    """Reads the output of ``nvcc -Xptxas -v``."""
    found: list[Resources] = []
    entry = architecture = function = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, architecture = match.groups()
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            found.append(Resources(function, architecture, *map(int, match.groups())))
        elif match := _REGISTERS.search(line):
            for each in found:
                if (each.symbol, each.architecture) == (entry, architecture):
                    each.registers = int(match[1])
                    shared = _SHARED.search(line)
                    each.shared = int(shared[1]) if shared else 0
    return found


def spill_faults(resources: Iterable[Resources], names: Mapping[str, str]) -> list[str]:
    """The functions that spill registers."""
    return [
        f"{names[each.symbol]} on {each.architecture} spills registers: {each.spill_stores} bytes "
        f"of stores, {each.spill_loads} bytes of loads"
        for each in resources
        if each.spill_stores > 0 or each.spill_loads > 0
    ]


def _as_row(resources: Resources) -> tuple[str, ...]:
    registers = "-" if resources.registers is None else str(resources.registers)
    sizes = (resources.spill_stores, resources.spill_loads, resources.stack, resources.shared)
    return (resources.architecture, registers, *map(str, sizes))


def table(resources: Iterable[Resources], names: Mapping[str, str]) -> str:
    """The resources of every function, one line for each architecture."""
    header = ("kernel", "on", "registers", "spill stores", "spill loads", "stack", "shared")
    rows: list[tuple[str, ...]] = [header]
    last = ""
    # A template that several files instantiate is compiled in each of them.
    for name, each in sorted({(names[each.symbol], _as_row(each)) for each in resources}):
        rows.append(("" if name == last else name, *each))
        last = name
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def summary(resources: Iterable[Resources]) -> str:
    """One line for each architecture, for kernels that are not ours."""
    by_architecture: dict[str, list[Resources]] = defaultdict(list)
    for each in resources:
        by_architecture[each.architecture].append(each)
    lines = []
    for architecture, group in sorted(by_architecture.items()):
        spilling = [each for each in group if each.spill_stores > 0 or each.spill_loads > 0]
        lines.append(
            f"{architecture}: {len(group)} kernels, up to "
            f"{max(each.registers or 0 for each in group)} registers and "
            f"{max(each.shared for each in group)} bytes of shared memory; {len(spilling)} spill, "
            f"up to {max((each.spill_stores for each in spilling), default=0)} bytes"
        )
    return "\n".join(lines)
