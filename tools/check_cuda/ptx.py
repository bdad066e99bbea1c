"""Reads PTX, and checks its floating-point arithmetic.

PTX rather than machine code, where correctly rounded division and square root are made of fused
multiply-adds. What has ``.rn`` in PTX, ptxas does not contract.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEADER = re.compile(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)[^;{]*([;{])")
# Braces open blocks in front of an instruction; labels and predicates stand there, too.
_STATEMENT = re.compile(r"(?:[\s{}]+|[\w$]+:|@!?%\w+)*([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_FLOAT = re.compile(r"b?f(?:16|32|64)(?:x2)?")
_ROUNDED = {"add", "sub", "mul", "div", "sqrt", "rcp"}
_FUSED = {"fma", "mad"}
_INEXACT = {"approx", "full", "ftz"}


@dataclass(frozen=True)
class Instruction:
    """One instruction, without its predicate.

    Attributes:
        opcode: With all modifiers, such as ``ld.global.v4.f32``.
        operands: As they are written.
    """

    opcode: str
    operands: str

    @property
    def operation(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> list[str]:
        """Everything behind the operation, types too."""
        return self.opcode.split(".")[1:]

    @property
    def is_float(self) -> bool:
        """Whether a type of it is one of floating-point numbers."""
        return any(_FLOAT.fullmatch(modifier) for modifier in self.modifiers)

    def __str__(self) -> str:
        return f"{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Function:
    """A kernel, or a function that kernels call, by its mangled name."""

    symbol: str
    is_kernel: bool
    instructions: tuple[Instruction, ...]


def _body(text: str, start: int) -> str:
    """The text from an opening brace to the one that closes it."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : start + match.end()]
    raise ValueError("PTX has a function without an end")


def _instructions(body: str) -> Iterator[Instruction]:
    for statement in body.split(";"):
        # Directives begin with a dot and do not match.
        if match := _STATEMENT.match(statement):
            yield Instruction(match[1], " ".join(match[2].split()))


def parse_ptx(text: str) -> list[Function]:
    """The functions that a PTX file defines."""
    text = _COMMENT.sub("", text)
    return [
        Function(
            header[2], header[1] == "entry", tuple(_instructions(_body(text, header.start(3))))
        )
        for header in _HEADER.finditer(text)
        if header[3] == "{"
    ]


def _arithmetic_fault(instruction: Instruction) -> str | None:
    """Why an instruction may give other bits elsewhere, or None."""
    operation, modifiers = instruction.operation, instruction.modifiers
    if not instruction.is_float:
        return None
    if _INEXACT.intersection(modifiers):
        return "is not correctly rounded"
    if operation in _FUSED:
        return "is fused"
    if operation in _ROUNDED and "rn" not in modifiers:
        return "is not marked .rn, so that it may be contracted"
    if operation in ("atom", "red"):
        return "adds up in any order"
    return None


def arithmetic_faults(function: Function) -> list[str]:
    """The kinds of arithmetic that a function must not have, each with its first instance."""
    found: dict[tuple[str, str], list[Instruction]] = defaultdict(list)
    for instruction in function.instructions:
        if fault := _arithmetic_fault(instruction):
            found[instruction.opcode, fault].append(instruction)
    return [
        f"{opcode} {fault}: {len(instances)} times, first {instances[0]}"
        for (opcode, fault), instances in found.items()
    ]


def count_arithmetic(functions: Iterable[Function]) -> int:
    """How many instructions round: what the check of arithmetic is about."""
    return sum(
        instruction.is_float and instruction.operation in _ROUNDED
        for function in functions
        for instruction in function.instructions
    )
