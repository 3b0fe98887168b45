"""Who calls: API keys, the tenants they stand for, what they may spend, and who is an administrator."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from starlette.types import Scope

from octavo_shared.keyfile import KeyFileError, KeyRecord, digest_of, read_key_file
from octavo_shared.settings import SettingError

# The tenant of everyone while the server has no keys.
ANONYMOUS = "anonymous"
# Whoever stands between sets one of these.
_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"))

logger = logging.getLogger(__name__)


def tenant_of(key: str) -> str:
    """The tenant a key stands for: always the same, and nothing the key could be told from. 16 hex digits after ``t-``."""
    return "t-" + blake2b(key.encode(), digest_size=8, person=b"octavo tenant").hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. ``known``: it came with one of the server's keys; ``admin``: with one for administration.

    ``bucket`` names where the key's rates are counted. Rates are per minute, 0 = no bound; ``priority_ceiling`` is the most
    urgent (lowest) priority allowed, None = any; ``weight`` is the tenant's share under the fair policy, 0 = not said here.
    """

    tenant: str = ANONYMOUS
    known: bool = False
    admin: bool = False
    bucket: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    priority_ceiling: int | None = None
    weight: float = 0.0

    @property
    def is_rated(self) -> bool:
        """Its requests are counted."""
        return self.requests_per_minute > 0 or self.tokens_per_minute > 0

    def priority(self, wanted: int) -> int:
        """The priority that a request of this caller gets: the one it wants, but none before its ceiling."""
        return wanted if self.priority_ceiling is None else max(wanted, self.priority_ceiling)


NOBODY = Caller()


class KeyRing:
    """The server's keys: those of the settings, and those of a file that may change while the server runs.

    What is kept is digests, blinded by a secret of this process: how long a look-up takes depends on numbers that nobody
    outside knows, so it says nothing about how near a wrong key is to a right one.
    """

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str], path: Path | None = None) -> None:
        """Raises SettingError when the file cannot be used."""
        self._blind = secrets.token_bytes(32)
        self._path = path
        self._stamp: tuple[int, ...] = ()
        self._fixed = {digest_of(key.encode()): Caller(tenant_of(key), known=True) for key in api_keys}
        self._fixed |= {digest_of(key.encode()): Caller(tenant_of(key), known=True, admin=True) for key in admin_keys}
        # A file guards the API even while it is empty: it was named so that not everyone may come in.
        self.guards_api = bool(api_keys) or path is not None
        self.has_admins = False
        self.tenants: list[str] = []
        self._callers: dict[bytes, Caller] = {}
        if path is None:
            self._use({})
            return
        try:
            with contextlib.suppress(OSError):
                self._stamp = self._stamp_of(path)
            self._use(self._from_file(read_key_file(path)))
        except KeyFileError as error:
            raise SettingError(f"--api-key-file (OCTAVO_API_KEY_FILE): {error}") from error

    def caller(self, scope: Scope) -> Caller:
        """Who sends a request, by its bearer token."""
        scheme, _, given = header_of(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            return NOBODY
        return self._callers.get(self._blinded(digest_of(given.strip())), NOBODY)

    def reload(self, *, force: bool = False) -> bool:
        """Read the file again if it has changed (or in any case); True when it was taken.

        A file that cannot be used changes nothing: the keys stay as they are, and the log says so, once.
        """
        if self._path is None:
            return False
        try:
            stamp = self._stamp_of(self._path)
        except OSError as error:
            # Being replaced, perhaps; or gone, which is no wish to let nobody in.
            if self._stamp:
                logger.error("%s cannot be read (%s): the keys stay as they are", self._path, error.strerror)
            self._stamp = ()
            return False
        if stamp == self._stamp and not force:
            return False
        self._stamp = stamp
        try:
            self._use(self._from_file(read_key_file(self._path)))
        except KeyFileError as error:
            logger.error("%s: the keys stay as they are", error)
            return False
        logger.info("%s was read: %d keys", self._path, len(self._callers) - len(self._fixed))
        return True

    def _from_file(self, records: Iterable[KeyRecord]) -> dict[str, Caller]:
        callers: dict[str, Caller] = {}
        for record in records:
            if record.sha256 in self._fixed:
                raise KeyFileError(f"{self._path}: a key of tenant {record.tenant} is given as a setting as well")
            callers[record.sha256] = Caller(
                record.tenant,
                known=True,
                admin=record.admin,
                # Part of a digest of random bits: it says nothing about them.
                bucket=record.sha256[:16],
                requests_per_minute=record.requests_per_minute,
                tokens_per_minute=record.tokens_per_minute,
                priority_ceiling=record.priority_ceiling,
                weight=record.weight,
            )
        return callers

    def _use(self, from_file: dict[str, Caller]) -> None:
        callers = {**self._fixed, **from_file}
        self.has_admins = any(caller.admin for caller in callers.values())
        self.tenants = [caller.tenant for caller in callers.values()]
        self._callers = {self._blinded(digest): caller for digest, caller in callers.items()}

    def _blinded(self, digest: str) -> bytes:
        return blake2b(digest.encode(), digest_size=32, key=self._blind).digest()

    @staticmethod
    def _stamp_of(path: Path) -> tuple[int, ...]:
        status = os.stat(path)
        return (status.st_mtime_ns, status.st_size, status.st_ino)


def header_of(scope: Scope, name: bytes) -> bytes:
    """A header's value, b"" when it is not there."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def is_local(scope: Scope) -> bool:
    """The request was made on this machine, to this machine, by nobody's proxy and no foreign web page."""
    client = scope.get("client")
    if client is None or not _is_loopback(client[0]):
        return False
    if any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    if not _is_loopback(_host_of(header_of(scope, b"host"))):
        # A page whose name was made to point here.
        return False
    origin = header_of(scope, b"origin")
    return not origin or _is_loopback(_host_of(origin.rpartition(b"://")[2]))


def _host_of(authority: bytes) -> str:
    text = authority.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
