"""The compiled loops: packed instructions of the right width, and no fused multiply-add."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache

import pytest

from torchrec_ext import _C

pytestmark = [
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)"),
    pytest.mark.skipif(
        "x86" not in platform.machine(), reason="the loops are dispatched on x86-64 only"
    ),
]
REGISTER = {"avx512": "zmm", "avx2": "ymm", "default": "xmm"}
FUNCTION = {"avx512": "avx512", "avx2": "avx2", "default": "fallback"}


@cache
def _functions() -> dict[str, str]:
    """Disassembly by demangled name."""
    command = ["objdump", "-dC", "--no-show-raw-insn", _C.__file__]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    parts = re.split(r"^[0-9a-f]+ <(.*)>:$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _loops(optimizer: str, rounding: str, capability: str) -> str:
    """The code that updates rows with this optimizer, compiled for this capability."""
    found = [
        code
        for name, code in _functions().items()
        if f"update_rows<torchrec_ext::{optimizer}, torchrec_ext::{rounding}" in name
        and f"::{FUNCTION[capability]}(" in name
    ]
    assert found, f"no function updates rows with {optimizer} for {capability}"
    return "".join(found)


def _count(code: str, instruction: str, register: str) -> int:
    return len(re.findall(rf"\tv?{instruction}\s.*%{register}", code))


@pytest.mark.parametrize("capability", REGISTER)
@pytest.mark.parametrize(
    "optimizer, instructions",
    [
        ("ExactSgd<false>", ["mulps", "subps"]),
        ("ExactSgd<true>", ["mulps", "addps", "subps"]),
        ("ExactAdagrad", ["sqrtps", "divps", "mulps"]),
        ("ExactRowWiseAdagrad", ["mulps", "addps", "subps"]),
        ("Ftrl<true, false, false>", ["sqrtps", "divps", "mulps"]),
        ("Ftrl<true, true, false>", ["sqrtps", "divps", "mulps"]),
        ("Ftrl<true, true, true>", ["sqrtps", "divps", "mulps"]),
        ("Ftrl<false, false, false>", ["divpd", "mulpd", "divps"]),
        ("Ftrl<false, true, false>", ["divpd", "mulpd", "divps"]),
        ("Ftrl<false, true, true>", ["divpd", "mulpd", "divps"]),
        ("Adam<false>", ["sqrtps", "divps", "mulps"]),
        ("Adam<true>", ["sqrtps", "divps", "mulps"]),
        ("PartialRowWiseAdam", ["mulps", "addps", "subps"]),
        ("Lamb", ["sqrtps", "divps", "mulps"]),
    ],
)
@pytest.mark.parametrize("rounding", ["NearestRounding<float>", "NearestRounding<c10::Half>"])
def test_loops_over_columns_are_vectorised(capability, optimizer, instructions, rounding) -> None:
    code = _loops(optimizer, rounding, capability)
    for instruction in instructions:
        assert _count(code, instruction, REGISTER[capability]) > 0, instruction


def test_stochastic_rounding_is_vectorised() -> None:
    code = _loops("Ftrl<true, false, false>", "StochasticRounding", "avx512")
    assert _count(code, "sqrtps", "zmm") > 0 and _count(code, "pmulld", "zmm") > 0


def test_multiplications_and_additions_are_not_fused() -> None:
    fused = re.compile(r"\tv?fn?m(add|sub)[0-9a-z]*\s")
    assert not [name for name, code in _functions().items() if fused.search(code)]
