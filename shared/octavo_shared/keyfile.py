"""The file that says which API keys there are: records of tenants, with a key's hash and never the key.

Keys that are made here hold 256 random bits: nobody can try them out, so one SHA-256 protects them at rest as well as a slow
hash would, and a slow one would let anybody keep a gateway busy by sending wrong keys (cf. OWASP, Password Storage Cheat Sheet:
slow hashes are for secrets that people choose).
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a key begins with, so that people and secret scanners know one when they see it.
PREFIX = "octavo-"
KEY_BYTES = 32
MAX_FILE_BYTES = 16 << 20

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
# Tenants of this shape stand for keys of --api-key.
_DERIVED = re.compile("t-[0-9a-f]{16}")
_DIGEST = re.compile("[0-9a-f]{64}")
_FIELDS = {"tenant", "sha256", "requests_per_minute", "tokens_per_minute", "priority_ceiling", "weight", "admin"}


class KeyFileError(ValueError):
    """A key file cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. ``sha256`` is its digest in hex.

    Rates are per minute, 0 = no bound. ``priority_ceiling``: the most urgent (lowest) priority its requests may have; None =
    no bound. ``weight``: the tenant's share under the fair policy, 0 = not said here.
    """

    tenant: str
    sha256: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    priority_ceiling: int | None = None
    weight: float = 0.0
    admin: bool = False


def digest_of(key: bytes) -> str:
    """The digest of a key, in hex."""
    return hashlib.sha256(key).hexdigest()


def mint_key() -> str:
    """A new key: 256 random bits in URL-safe letters."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def read_key_file(path: Path) -> list[KeyRecord]:
    """The records of a key file.

    Raises:
        KeyFileError: it cannot be read, or something in it is wrong.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise KeyFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} is no TOML: {error}") from None
    tables = content.pop("key", [])
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise KeyFileError(f"{path} may only have tables [[key]]")
    records = []
    for number, table in enumerate(tables, 1):
        try:
            records.append(record_of(table))
        except ValueError as error:
            raise KeyFileError(f"{path}: key {number}: {error}") from None
    _check_together(path, records)
    return records


def record_of(table: Mapping[str, Any]) -> KeyRecord:
    """One table as a record.

    Raises:
        ValueError: a field is unknown, missing or out of range.
    """
    if unknown := set(table) - _FIELDS:
        raise ValueError(f"there is no field {min(unknown)!r}")
    tenant, digest, admin = table.get("tenant"), table.get("sha256"), table.get("admin", False)
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise ValueError("tenant must be 1 to 64 letters, digits or any of _.@-, the first a letter or digit")
    if _DERIVED.fullmatch(tenant):
        raise ValueError("tenant must not look like those of --api-key (t- and 16 hex digits)")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("sha256 must be 64 lower-case hex digits: the digest of the key, not the key")
    if not isinstance(admin, bool):
        raise ValueError("admin must be true or false")
    weight = table.get("weight", 0.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError("weight must be a number")
    if "weight" in table and not 0 < weight <= 1e6:
        raise ValueError("weight must be above 0 and at most 1e6")
    return KeyRecord(
        tenant,
        digest,
        requests_per_minute=_whole(table, "requests_per_minute", 1, 1 << 40) or 0,
        tokens_per_minute=_whole(table, "tokens_per_minute", 1, 1 << 40) or 0,
        priority_ceiling=_whole(table, "priority_ceiling", -(1 << 31), (1 << 31) - 1),
        weight=float(weight),
        admin=admin,
    )


def table_text(record: KeyRecord) -> str:
    """A record as it stands in the file."""
    lines = ["[[key]]", f'tenant = "{record.tenant}"', f'sha256 = "{record.sha256}"']
    for name in ("requests_per_minute", "tokens_per_minute", "weight"):
        if value := getattr(record, name):
            lines.append(f"{name} = {value}")
    if record.priority_ceiling is not None:
        lines.append(f"priority_ceiling = {record.priority_ceiling}")
    if record.admin:
        lines.append("admin = true")
    return "\n".join(lines) + "\n"


def _whole(table: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}")
    return value


def _check_together(path: Path, records: list[KeyRecord]) -> None:
    digests: set[str] = set()
    weights: dict[str, float] = {}
    for number, record in enumerate(records, 1):
        if record.sha256 in digests:
            raise KeyFileError(f"{path}: key {number}: the same key is there twice")
        digests.add(record.sha256)
        if weights.setdefault(record.tenant, record.weight) != record.weight:
            raise KeyFileError(f"{path}: key {number}: the keys of tenant {record.tenant} have different weights")
