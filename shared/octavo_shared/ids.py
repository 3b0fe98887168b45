"""Names and numbers that identify things across processes. All are minted by us (never by a client)."""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

# A serial is an unsigned 64-bit number in hex.
_REQUEST_ID = re.compile(r"(.+)-(0|[1-9a-f][0-9a-f]{0,15})", re.DOTALL)


class Attempt(NamedTuple):
    """Who may speak for a choice: a scheduler's term, then a count within it. Compared in that order (rule L2)."""

    term: int
    n: int


NO_ATTEMPT = Attempt(0, 0)
# Terms may be milliseconds of Redis' clock, and its scripts count exactly up to 2^53: one beyond this was never given.
MOST_TERM = 1 << 52
MOST_ATTEMPTS = 1 << 31


def read_attempt(term: int, n: int) -> Attempt:
    """An attempt that somebody else has written.

    Raises:
        ValueError: nobody was ever given that one. If it counted, no scheduler could speak any more.
    """
    if term > MOST_TERM or n > MOST_ATTEMPTS:
        raise ValueError(f"attempt ({term}, {n}) was never given")
    return Attempt(term, n)


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
            ValueError: the text is not exactly what ``str`` of an id gives, so no request has two spellings.
        """
        match = _REQUEST_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"not a request id: {text!r}")
        return cls(match[1], int(match[2], 16))


def mint_incarnation() -> str:
    """A name for one life of one process: 12 hex digits, unique for all practical purposes."""
    return secrets.token_hex(6)
