"""`octavo keys`: make an API key for a tenant. The file gets its hash, the terminal the key, and nothing keeps it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from octavo.errors import CommandError
from octavo_shared.keyfile import KeyFileError, digest_of, mint_key, read_key_file, record_of, table_text


def make_key(argv: list[str]) -> int:
    """Add a record to a key file and print its key. Raises CommandError."""
    parser = argparse.ArgumentParser(
        prog="octavo keys",
        description="Make an API key for a tenant: adds its hash and what it may do to FILE (see --api-key-file), and "
        "prints the key, this once. Running gateways take the change up by themselves.",
    )
    parser.add_argument("file", metavar="FILE", help="the key file; it is made if it is not there")
    parser.add_argument("tenant", metavar="TENANT", help="whose key it is; a tenant may have several")
    parser.add_argument("--requests-per-minute", type=int, metavar="N", help="requests a minute [no bound]")
    parser.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="prompt and output tokens a minute [no bound]"
    )
    parser.add_argument("--priority-ceiling", type=int, metavar="N", help="most urgent (lowest) priority [no bound]")
    parser.add_argument("--weight", type=float, metavar="X", help="share under --scheduling-policy fair [1]")
    parser.add_argument("--admin", action="store_true", help="an administrator's key")
    args = vars(parser.parse_args(argv))
    path = Path(args.pop("file")).expanduser()
    key = mint_key()
    fields = {name: value for name, value in args.items() if value is not None and value is not False}
    try:
        record = record_of({**fields, "sha256": digest_of(key.encode())})
    except ValueError as error:
        raise CommandError(str(error)) from error
    try:
        known = read_key_file(path) if path.exists() else []
    except KeyFileError as error:
        raise CommandError(str(error)) from error
    others = {one.weight for one in known if one.tenant == record.tenant}
    if others and record.weight not in others:
        raise CommandError(
            f"the keys of tenant {record.tenant} have weight {others.pop() or 1:g}: all must have the same"
        )
    _append(path, ("\n" if known else "") + table_text(record))
    print(key)
    return 0


def _append(path: Path, text: str) -> None:
    """Put a new file in the old one's place: whoever reads meanwhile sees one or the other."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        mode = path.stat().st_mode & 0o777 if before else 0o600
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(before + ("\n" if before and not before.endswith("\n") else "") + text)
        os.chmod(beside, mode)
        os.replace(beside, path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
