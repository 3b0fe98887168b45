"""Errors that end a command with a message for its user instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """Anything the user can act on; `main` prints the message and exits with status 1."""


class ModelError(CommandError):
    """A model could not be found, fetched or converted."""
