"""Names and numbers that identify things across processes. All are minted by us (never by a client)."""

from __future__ import annotations

import secrets
from typing import NamedTuple


class Attempt(NamedTuple):
    """Who may speak for a choice: a scheduler's term, then a count within it. Compared in that order (rule L2)."""

    term: int
    n: int


NO_ATTEMPT = Attempt(0, 0)


class RequestId(NamedTuple):
    """A request, named after the log that holds its answer (rule L4)."""

    log: str
    serial: int

    def __str__(self) -> str:
        return f"{self.log}-{self.serial:x}"

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Read ``"<log>-<serial in hex>"``.

        Raises:
            ValueError: the text is not of that form.
        """
        log, dash, serial = text.rpartition("-")
        if not dash or not log:
            raise ValueError(f"not a request id: {text!r}")
        return cls(log, int(serial, 16))


def mint_incarnation() -> str:
    """A name for one life of one process: 12 hex digits, unique for all practical purposes."""
    return secrets.token_hex(6)
