"""docs/bad_input.md has a line for each group of cases, and none that no case is for."""

from pathlib import Path

from . import test_gradients, test_lookups, test_settings, test_sharded

PAGE = Path(__file__).parents[2] / "docs" / "bad_input.md"


def _lines(heading: str) -> list[str]:
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()]
    return [line for line in lines if line not in ("Input", "---") and f"| {line} |" in section]


def test_every_group_has_its_line() -> None:
    for heading, groups in (
        ("Lookups", {case.group for case in test_lookups.CASES}),
        ("Gradients", set(test_gradients.GROUPS)),
        ("Settings", set(test_settings.GROUPS)),
        ("Sharded models", set(test_sharded.GROUPS)),
    ):
        lines = _lines(heading)
        assert len(lines) == len(set(lines)) and set(lines) == groups, heading


def test_there_are_sixty_cases() -> None:
    settings = len(test_settings.SETTINGS + test_settings.FUSED_PARAMS)
    assert len(test_lookups.CASES) + settings >= 60
