"""Who calls: API keys, the tenants they stand for, and who is an administrator."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from starlette.types import Scope

# The tenant of everyone while the server has no keys.
ANONYMOUS = "anonymous"
# Whoever stands between sets one of these.
_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"))


def tenant_of(key: str) -> str:
    """The tenant a key stands for: always the same, and nothing the key could be told from. 16 hex digits after ``t-``."""
    return "t-" + blake2b(key.encode(), digest_size=8, person=b"octavo tenant").hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. ``known``: it came with one of the server's keys; ``admin``: with one for administration."""

    tenant: str = ANONYMOUS
    known: bool = False
    admin: bool = False


NOBODY = Caller()


class KeyRing:
    """The server's keys."""

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self.guards_api = bool(api_keys)
        self.has_admins = bool(admin_keys)
        self._callers = [(key.encode(), Caller(tenant_of(key), known=True)) for key in api_keys]
        self._callers += [(key.encode(), Caller(tenant_of(key), known=True, admin=True)) for key in admin_keys]

    @property
    def tenants(self) -> list[str]:
        """The tenants of all keys, in the order of the settings, administrators last."""
        return [caller.tenant for _, caller in self._callers]

    def caller(self, scope: Scope) -> Caller:
        """Who sends a request, by its bearer token."""
        scheme, _, given = header_of(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            return NOBODY
        given = given.strip()
        found = NOBODY
        # Every key is compared, so that the time taken says nothing.
        for key, caller in self._callers:
            if hmac.compare_digest(given, key):
                found = caller
        return found


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
