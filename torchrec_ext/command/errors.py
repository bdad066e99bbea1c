"""The exceptions the command turns into a single line on stderr."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the configuration, the data or the environment that the user can correct.

    The message is one line: what is wrong, where, and what to change.
    """


class AgreedError(UserError):
    """A ``UserError`` of some rank that every rank knows of, so that rank 0 alone reports it."""
