"""`octavo certs`: an authority and certificates of its for trying TLS out. For development: its key lies beside them."""

from __future__ import annotations

import argparse
import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from octavo.errors import CommandError

SERVICES = ("gateway", "scheduler", "executor", "redis")
DEFAULT_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Authority:
    """What signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certs(argv: list[str]) -> int:
    """Make certificates in a folder. Raises CommandError."""
    parser = argparse.ArgumentParser(
        prog="octavo certs",
        description="Make an authority (ca.pem) and a certificate for each of gateway, scheduler, executor and redis "
        "(NAME.pem, NAME-key.pem) in DIR. An authority that is there is used again, certificates are made anew. "
        "For development: whoever has ca-key.pem can pose as anyone.",
    )
    parser.add_argument("dir", metavar="DIR")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="further host name or address they are good for"
    )
    parser.add_argument("--days", type=int, default=365, metavar="N", help="how long they are good for [365]")
    args = parser.parse_args(argv)
    if not 1 <= args.days <= 3650:
        raise CommandError("--days must be from 1 to 3650")
    folder = Path(args.dir).expanduser()
    names = [_general_name(name) for name in dict.fromkeys((*DEFAULT_NAMES, *SERVICES, *args.host))]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(folder, args.days)
        for service in SERVICES:
            key = ec.generate_private_key(ec.SECP256R1())
            _write(folder, service, _leaf(authority, key, service, names, args.days), key)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}") from error
    print(folder)
    return 0


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise CommandError(f"--host: {name!r} is neither a host name nor an address") from error


def _authority(folder: Path, days: int) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("its key is none of ours")
        return Authority(certificate, key)
    except FileNotFoundError:
        pass
    except (ValueError, TypeError) as error:
        raise CommandError(f"the authority in {folder} cannot be used: {error}") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Octavo development authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "ca", certificate, key)
    return Authority(certificate, key)


def _leaf(
    authority: Authority, key: ec.EllipticCurvePrivateKey, service: str, names: list[x509.GeneralName], days: int
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"octavo {service}")])
    signer = authority.key.public_key()
    return (
        _builder(subject, authority.certificate.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        # Each side of a mutual line shows one and asks for one.
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks differ a little.
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=days))
    )


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{name}-key.pem"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
