"""The examples of the pages in docs/ give what the pages print, and the tests they name exist."""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchrec_ext

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.fixture
def without_hook() -> Iterator[None]:
    """Leaves TorchRec as it was."""
    yield
    torchrec_ext.uninstall()


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_page(page: Path) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for number, block in enumerate(blocks):
        if ">>>" not in block:
            exec(block, names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), number)
        report: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(
            test, out=report.append, clear_globs=False
        )
        names.update(test.globs)
        assert result.attempted > 0 and result.failed == 0, "".join(report)


def _tests_of(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    names = set(TEST_NAME.findall(page.read_text()))
    missing = [f"{file}::{test}" for file, test in names if test not in _tests_of(ROOT / file)]
    assert not missing


def test_every_cell_of_the_features_names_a_test() -> None:
    page = (ROOT / "docs" / "features.md").read_text()
    lines = page.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "---" and row[-3:] != ["stock", "FTRL", "Adam"]]
    assert len(rows) > 30
    used: set[str] = set()
    for feature, *cells in rows:
        assert len(cells) == 3, feature
        for cell in cells:
            numbers = re.findall(r"\bT(\d+)\b", cell)
            assert numbers, f"{feature}: {cell}"
            assert cell.startswith(("works", "fails: ")), f"{feature}: {cell}"
            used.update(numbers)
    listed = re.findall(rf"^- T(\d+):\s+{TEST_NAME.pattern}$", page, re.MULTILINE)
    assert sorted(used, key=int) == [number for number, *_ in listed]
