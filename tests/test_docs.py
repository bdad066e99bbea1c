"""The examples of the pages in docs/ give what the pages print."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


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
