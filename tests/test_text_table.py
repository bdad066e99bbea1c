"""Tables as text are aligned."""

from torchrec_ext.text_table import format_table


def test_numbers_are_aligned_right() -> None:
    assert format_table([["name", "rows"], ["a", "7"]]) == "name  rows\na        7"
