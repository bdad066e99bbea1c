"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of text, header first; columns of numbers and shares to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def align(text: str, width: int) -> str:
        return text.rjust(width) if text[:1].isdigit() else text.ljust(width)

    return "\n".join(
        "  ".join(align(text, width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
