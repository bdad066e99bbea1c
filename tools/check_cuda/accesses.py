"""Checks on PTX of how kernels move columns.

Four values at once, of 4 or of 2 bytes; one by one in the kernels for rows of any width, where a
vector would not be aligned.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .build import ROOT, include_flags
from .names import template_arguments
from .ptx import Function, Instruction

_TYPE = re.compile(r"(?:b|u|s|f|bf)(8|16|32|64|128)")
_ADDRESS = re.compile(r"\[([%\w$]+)(?:\+(-?\d+))?\]")
_SPACES = {"global", "shared", "local", "param", "const"}
_COLUMNS = 4
FLOATS = 4 * _COLUMNS
HALVES = 2 * _COLUMNS

COLUMN_KERNELS = (
    "update_rows_kernel",
    "store_sums_kernel",
    "per_sample_weight_grad_kernel",
    "look_up_rows_kernel",
)


@dataclass(frozen=True)
class States:
    """How many states an optimizer has of shape [rows, D] and [rows]."""

    per_column: int
    per_row: int


@dataclass(frozen=True)
class Expected:
    """The accesses to global memory that a kernel's source has.

    Attributes:
        stores: The least number of stores of so many bytes at once. All others are forbidden, but
            for scalars.
        loads: The least number of loads of so many bytes at once.
        scalars: The most stores of a single float32: row-wise states, and sums over a row. None:
            any number.
        vectors: Whether four columns are moved at once. If not, no two are.
    """

    stores: dict[int, int]
    loads: dict[int, int]
    scalars: int | None = 0
    vectors: bool = True


@dataclass(frozen=True)
class Access:
    """A load or store: its size in bytes as a whole and of each value, and its address."""

    size: int
    value_size: int
    base: str
    offset: int


def read_access(instruction: Instruction) -> Access | None:
    """Takes a load or store apart; None for other instructions."""
    if instruction.operation not in ("ld", "ldu", "st"):
        return None
    kind = _TYPE.fullmatch(instruction.modifiers[-1])
    address = _ADDRESS.search(instruction.operands)
    if kind is None or address is None:
        raise ValueError(f"cannot read the PTX instruction {instruction}")
    count = next((int(m[1:]) for m in instruction.modifiers if re.fullmatch(r"v\d", m)), 1)
    value_size = int(kind[1]) // 8
    return Access(count * value_size, value_size, address[1], int(address[2] or 0))


def _space(instruction: Instruction) -> str | None:
    """The memory that an access names; None for a generic address."""
    named = (modifier.partition("::")[0] for modifier in instruction.modifiers)
    return next((space for space in named if space in _SPACES), None)


def global_accesses(function: Function, operations: tuple[str, ...]) -> list[Access]:
    """The loads (``ld``, ``ldu``) or stores (``st``) of global memory, or of generic addresses."""
    return [
        access
        for instruction in function.instructions
        if instruction.operation in operations and _space(instruction) in ("global", None)
        if (access := read_access(instruction)) is not None
    ]


def space_faults(function: Function) -> list[str]:
    """Accesses that do not say what memory they go to: they are slower, and may be to the stack."""
    generic = [
        instruction
        for instruction in function.instructions
        if read_access(instruction) is not None and _space(instruction) is None
    ]
    return [f"{len(generic)} generic addresses, first {generic[0]}"] if generic else []


def expected_accesses(name: str, states: dict[str, States]) -> Expected | None:
    """What a kernel of COLUMN_KERNELS, by its demangled name, has to do; None for other kernels.

    Args:
        name: With namespaces and template arguments.
        states: The states of each optimizer's type.
    """
    family = name.partition("<")[0].rpartition("::")[2]
    if family not in COLUMN_KERNELS:
        return None
    arguments = template_arguments(name)
    weight = FLOATS if name.replace(" ", "").endswith(("<float>>", ",float>")) else HALVES
    if family == "look_up_rows_kernel" or arguments[0] == "1":
        return _one_by_one(family, arguments, weight // _COLUMNS, states)
    # Gradients may have any dtype, so that loads of either width are always there.
    loads = Counter({FLOATS: 1, HALVES: 2})
    if family == "update_rows_kernel":
        of_optimizer = states[arguments[1]]
        columns = Counter({weight: 1}) + Counter({FLOATS: of_optimizer.per_column})
        # There is code for narrow rows and code for wide ones.
        return Expected(dict(columns), dict(loads + columns), 2 * of_optimizer.per_row)
    if family == "per_sample_weight_grad_kernel":
        return Expected({}, dict(loads + Counter({weight: 1})), 1)
    return Expected({FLOATS: 1}, dict(loads), 0)


def _one_by_one(
    family: str, arguments: list[str], weight: int, states: dict[str, States]
) -> Expected:
    """The same for a kernel of rows of any width; ``weight`` is the size of an element."""
    # A lane's columns are as many as elsewhere. Gradients and outputs may have any dtype.
    outputs = Counter({FLOATS // _COLUMNS: _COLUMNS, HALVES // _COLUMNS: 2 * _COLUMNS})
    weights = Counter({weight: _COLUMNS})
    if family == "update_rows_kernel":
        of_optimizer = states[arguments[1]]
        columns = weights + Counter({4: _COLUMNS * of_optimizer.per_column})
        return Expected(dict(columns), dict(outputs + columns), None, vectors=False)
    if family == "look_up_rows_kernel":
        return Expected(dict(outputs), dict(weights), None, vectors=False)
    if family == "store_sums_kernel":
        return Expected({4: _COLUMNS}, dict(outputs), None, vectors=False)
    return Expected({}, dict(outputs + weights), 1, vectors=False)


def _parameter_pointers(function: Function) -> set[str]:
    """The registers that hold a kernel parameter as it is, turned to a global address."""
    results = {"ld.param": set[str](), "cvta.to.global": set[str]()}
    for instruction in function.instructions:
        kind = instruction.opcode.rpartition(".")[0]
        result, _, operand = instruction.operands.partition(", ")
        if kind == "ld.param" or (kind == "cvta.to.global" and operand in results["ld.param"]):
            results[kind].add(result)
    return results["cvta.to.global"]


def _split_vectors(function: Function, accesses: Iterable[Access]) -> list[str]:
    """Four neighbouring scalars at one address: columns that were not moved at once.

    The fields of a struct that a kernel parameter points to are neighbours, too, but no columns:
    they are the same for all threads.
    """
    parameters = _parameter_pointers(function)
    offsets: dict[tuple[str, int], set[int]] = defaultdict(set)
    for access in accesses:
        if access.size == access.value_size <= 4 and access.base not in parameters:
            offsets[access.base, access.size].add(access.offset)
    return [
        f"{_COLUMNS} neighbouring values of {size} bytes at [{base}+{first}] are loaded one by one"
        for (base, size), found in offsets.items()
        for first in sorted(found)
        if all(first + k * size in found for k in range(_COLUMNS))
    ]


def _vectors(function: Function, accesses: Iterable[Access]) -> list[str]:
    """Several values at one address, but for the fields of a parameter's struct."""
    parameters = _parameter_pointers(function)
    found = Counter(
        (access.size, access.value_size)
        for access in accesses
        if access.size > access.value_size and access.base not in parameters
    )
    return [
        f"{count} accesses of {size // value_size} values of {value_size} bytes at once, expected "
        "single ones: rows of any width are not aligned"
        for (size, value_size), count in sorted(found.items())
    ]


def access_faults(function: Function, expected: Expected) -> list[str]:
    """Accesses to columns that are missing, narrower than they should be, or too many."""
    loads = global_accesses(function, ("ld", "ldu"))
    stores = global_accesses(function, ("st",))
    if expected.vectors:
        faults = _split_vectors(function, loads)
    else:
        faults = _vectors(function, [*loads, *stores])
    for what, accesses, least in (
        ("load", loads, expected.loads),
        ("store", stores, expected.stores),
    ):
        sizes = Counter(access.size for access in accesses)
        faults += [
            f"{sizes[size]} {what}s of {size} bytes at once, expected {count} or more"
            for size, count in least.items()
            if sizes[size] < count
        ]
    sizes = Counter(access.size for access in stores)
    if expected.scalars is not None and sizes[4] > expected.scalars:
        faults.append(f"{sizes[4]} stores of single float32s, expected up to {expected.scalars}")
    faults += [
        f"{count} stores of {size} bytes, expected none"
        for size, count in sorted(sizes.items())
        if size != 4 and size not in expected.stores
    ]
    narrow = sum(access.size < 4 for access in loads)
    if expected.vectors and narrow > 0:
        faults.append(f"{narrow} loads of less than 4 bytes, expected none")
    return faults


def count_states(setup: ModuleType, optimizers: Iterable[str]) -> dict[str, States]:
    """Asks the optimizers' headers how many states each type has."""
    ordered = sorted(set(optimizers))
    calls = "".join(f"  report<{optimizer}>();\n" for optimizer in ordered)
    source = (
        '#include "csrc/optimizers/registry.h"\n#include <cstdio>\n'
        "using torchrec_ext::count_states;\n"
        "template <class Optimizer> void report() {\n"
        '  std::printf("%d %d\\n", count_states<Optimizer>(false),\n'
        "              count_states<Optimizer>(true));\n}\n"
        f"int main() {{\n{calls}}}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "states")
        command = [*setup.compiler().split(), "-std=c++20", f"-I{ROOT}", *include_flags(setup)]
        command += ["-x", "c++", "-", "-o", str(program)]
        subprocess.run(command, input=source, text=True, check=True)
        report = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    counts = [States(*map(int, line.split())) for line in report.splitlines()]
    return dict(zip(ordered, counts, strict=True))
