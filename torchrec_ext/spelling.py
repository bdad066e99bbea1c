"""Suggestions for names that are almost right."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(given: str, legal: Sequence[str], prefix: str = "") -> str:
    """Suggest the nearest legal name, as the end of an error message; empty if none is near.

    Args:
        given: What the user wrote.
        legal: What would have been legal.
        prefix: Text to put before the suggested name.
    """
    close = [name for name in legal if given and name.startswith(given)]
    close = close or difflib.get_close_matches(given, legal, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
