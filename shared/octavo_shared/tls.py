"""Certificates from settings, and who may speak gRPC with whom: TLS of both sides, and the secret that executors show."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Iterable
from pathlib import Path

import grpc

from octavo_shared.settings import GatewaySettings, GrpcSettings, SettingError

# Metadata of the call, so that a stranger is turned away before anything it says is read.
SECRET_HEADER = "x-octavo-executor-secret"

Metadata = tuple[tuple[str, str], ...]


def server_credentials(settings: GrpcSettings) -> grpc.ServerCredentials | None:
    """The scheduler's side: TLS with a certificate, mutual with authorities to judge executors by; None = plain text.

    Raises:
        SettingError: a file cannot be used, or one is missing beside the others.
    """
    chain, authorities = _own(settings), _authorities(settings)
    if chain is None:
        if authorities is not None:
            raise SettingError(f"{flag_of('grpc_ssl_ca_certs')}: a scheduler needs --grpc-ssl-certfile as well")
        return None
    return grpc.ssl_server_credentials([chain], authorities, require_client_auth=authorities is not None)


def channel_credentials(settings: GrpcSettings) -> grpc.ChannelCredentials | None:
    """The executor's side: TLS once there are authorities to judge the scheduler by; None = plain text.

    Raises:
        SettingError: a file cannot be used, or one is missing beside the others.
    """
    chain, authorities = _own(settings), _authorities(settings)
    if authorities is None:
        if chain is not None:
            raise SettingError(f"{flag_of('grpc_ssl_certfile')}: an executor needs --grpc-ssl-ca-certs as well")
        return None
    key, certificates = chain or (None, None)
    return grpc.ssl_channel_credentials(authorities, key, certificates)


def metadata_of(settings: GrpcSettings) -> Metadata:
    """What an executor sends with its call."""
    return ((SECRET_HEADER, settings.executor_secret),) if settings.executor_secret else ()


def may_attach(settings: GrpcSettings, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether the caller knows the secret, if there is one. The time taken says nothing about it."""
    if not settings.executor_secret:
        return True
    given = b""
    for name, value in metadata or ():
        if name == SECRET_HEADER:
            given = value.encode() if isinstance(value, str) else value
    return hmac.compare_digest(given, settings.executor_secret.encode())


def leaves_machine(address: str) -> bool:
    """Whether what is sent to ``host:port`` or ``unix:path`` may be read on a network."""
    host = address.rpartition(":")[0].strip("[]")
    return not address.startswith("unix:") and host not in ("127.0.0.1", "localhost", "::1")


def https_requirement(settings: GatewaySettings) -> ssl.VerifyMode:
    """Whether clients of the HTTP API need certificates, once everything about certificates has been found usable.

    Raises:
        SettingError: something cannot be used, or does not go together.
    """
    key, certificate, authorities = settings.ssl_keyfile, settings.ssl_certfile, settings.ssl_ca_certs
    if bool(key) != bool(certificate):
        missing = "ssl_certfile" if key else "ssl_keyfile"
        raise SettingError(f"{flag_of(missing)}: key and certificate go together")
    if key and certificate:
        check_pair(certificate, key, "ssl_certfile")
    elif authorities:
        raise SettingError(f"{flag_of('ssl_ca_certs')}: this needs --ssl-certfile and --ssl-keyfile as well")
    if authorities:
        check_authorities(authorities, "ssl_ca_certs")
    wanted = settings.ssl_cert_reqs
    if wanted and not authorities:
        raise SettingError(f"{flag_of('ssl_cert_reqs')}: certificates are judged by --ssl-ca-certs, which is not given")
    return ssl.VerifyMode((2 if authorities else 0) if wanted is None else wanted)


def check_pair(certfile: str, keyfile: str, name: str) -> None:
    """Check that a certificate chain and its key can be used. ``name`` is the certificate's setting.

    Raises:
        SettingError: they cannot.
    """
    try:
        # The empty password keeps OpenSSL from asking the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise SettingError(f"{flag_of(name)}: {certfile} and {keyfile} cannot be used together: {error}") from error


def check_authorities(path: str, name: str) -> None:
    """Check that a file holds certificates of authorities. ``name`` is its setting.

    Raises:
        SettingError: it does not.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise SettingError(f"{flag_of(name)}: {path} cannot be used: {error}") from error


def flag_of(name: str) -> str:
    """A setting as people know it."""
    return f"--{name.replace('_', '-')} (OCTAVO_{name.upper()})"


def _own(settings: GrpcSettings) -> tuple[bytes, bytes] | None:
    keyfile, certfile = settings.grpc_ssl_keyfile, settings.grpc_ssl_certfile
    if not keyfile and not certfile:
        return None
    if not keyfile or not certfile:
        missing = "grpc_ssl_certfile" if keyfile else "grpc_ssl_keyfile"
        raise SettingError(f"{flag_of(missing)}: key and certificate go together")
    check_pair(certfile, keyfile, "grpc_ssl_certfile")
    return Path(keyfile).read_bytes(), Path(certfile).read_bytes()


def _authorities(settings: GrpcSettings) -> bytes | None:
    if not settings.grpc_ssl_ca_certs:
        return None
    check_authorities(settings.grpc_ssl_ca_certs, "grpc_ssl_ca_certs")
    return Path(settings.grpc_ssl_ca_certs).read_bytes()
