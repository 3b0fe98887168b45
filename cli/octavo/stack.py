"""`octavo serve`: the log server, scheduler, executor and gateway as one supervised set of processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.child import ChildSpec
from octavo.console import StackConsole
from octavo.embedded_redis import EmbeddedRedis
from octavo.errors import CommandError
from octavo.flags import environment_of, given_flags, is_set, only_of
from octavo.instance import InstanceDir
from octavo.models import ResolvedModel, resolve_model
from octavo.supervisor import Supervisor
from octavo_shared.keyfile import KeyFileError, read_key_file
from octavo_shared.settings import (
    CommonSettings,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    SettingError,
    load_settings,
)
from octavo_shared.tls import channel_credentials, https_requirement, server_credentials

KINDS: tuple[type[CommonSettings], ...] = (GatewaySettings, SchedulerSettings, ExecutorSettings)
# Large models take long to read; a child that dies is noticed at once all the same.
_LOADING_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the gateway can be reached from this machine."""

    host: str
    port: int
    # How to ask over TLS whether it lives; None = plain HTTP.
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}://{self.host}:{self.port}"


def serve(args: argparse.Namespace) -> int:
    """Run the whole stack until a signal; the exit status. Raises CommandError."""
    started_s = time.monotonic()
    flags = given_flags(args, KINDS)
    gateway = _checked_settings(flags)
    port = _checked_port(gateway.host, gateway.port)
    model = resolve_model(gateway.model or None, revision=args.revision, gguf_dtype=args.gguf_dtype)
    values: dict[str, Any] = {**flags, "model": str(model.path), "port": port}
    if not gateway.served_model_name:
        values["served_model_name"] = [model.name]
    instance = InstanceDir()
    try:
        if not is_set("scheduler_address", flags):
            values["scheduler_address"] = f"unix:{instance.socket_path('scheduler.sock')}"
        redis = None
        if not is_set("redis_url", flags):
            redis = EmbeddedRedis(instance, appendfsync=gateway.redis_appendfsync)
            values["redis_url"] = redis.url
        address = Address(_reachable(gateway.host), port, _probe_context(gateway))
        settings = load_settings(SchedulerSettings, **only_of(SchedulerSettings, values))
        console = StackConsole()
        supervisor = Supervisor(
            _specs(redis, settings.scheduler_address, address, values, console, gateway.drain_timeout_s),
            show_line=console.line,
            on_ready=lambda: console.ready(_welcome(model, gateway, address, time.monotonic() - started_s)),
        )
        with console:
            return asyncio.run(supervisor.run())
    finally:
        instance.remove()


def _specs(
    redis: EmbeddedRedis | None,
    scheduler_address: str,
    address: Address,
    values: dict[str, Any],
    console: StackConsole,
    drain_s: float,
) -> list[ChildSpec]:
    """The children in the order in which they start; they stop in the reverse order."""
    specs = []
    if redis is not None:
        specs.append(ChildSpec("redis", redis.command, ready=redis.ping, quiet=True))
    needs = [spec.name for spec in specs]

    def service(
        name: str, kind: type[CommonSettings], ready: Callable[[], bool], needs: list[str], stop_timeout_s: float = 10.0
    ) -> ChildSpec:
        return ChildSpec(
            name,
            [sys.executable, "-m", f"octavo_{name}"],
            ready=ready,
            needs=needs,
            # Each gets to know what is meant for it: the executor needs no API key.
            environment=environment_of(only_of(kind, values)),
            ready_timeout_s=_LOADING_TIMEOUT_S,
            stop_timeout_s=stop_timeout_s,
            on_line=console.progress,
        )

    specs.append(service("scheduler", SchedulerSettings, lambda: accepts(scheduler_address), needs))
    # The executor has no port to ask; the gateway knows when one is attached and making progress.
    specs.append(service("executor", ExecutorSettings, lambda: http_ok(address, "/health/ready"), needs))
    specs.append(service("gateway", GatewaySettings, lambda: http_ok(address, "/health"), needs, drain_s + 10.0))
    return specs


def _checked_settings(flags: dict[str, Any]) -> GatewaySettings:
    """Every service's settings, read here first so that a wrong one is one message before anything starts."""
    try:
        server_credentials(load_settings(SchedulerSettings, **only_of(SchedulerSettings, flags)))
        channel_credentials(load_settings(ExecutorSettings, **only_of(ExecutorSettings, flags)))
        gateway = load_settings(GatewaySettings, **only_of(GatewaySettings, flags))
        https_requirement(gateway)
        if gateway.api_key_file:
            read_key_file(Path(gateway.api_key_file))
        return gateway
    except (SettingError, KeyFileError) as error:
        raise CommandError(str(error)) from error


def _checked_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises CommandError if it cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise CommandError(f"--host/--port: cannot listen on {host}:{port} ({error.strerror})") from error


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def accepts(address: str) -> bool:
    """Whether somebody listens at `host:port` or `unix:path`."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(address.removeprefix("unix:"))
            return True
        host, _, port = address.rpartition(":")
        with socket.create_connection((_reachable(host.strip("[]")), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def http_ok(address: Address, path: str) -> bool:
    """Whether GET `path` is answered with 200."""
    request = f"GET {path} HTTP/1.1\r\nHost: {address.host}\r\nConnection: close\r\n\r\n".encode()
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((address.host, address.port), timeout=2.0))
            if address.tls is not None:
                connection = stack.enter_context(address.tls.wrap_socket(connection))
            connection.sendall(request)
            answer = b""
            while len(answer) < 12 and (data := connection.recv(64)):
                answer += data
        return answer[:5] == b"HTTP/" and answer[9:12] == b"200"
    except OSError:
        return False


def _probe_context(gateway: GatewaySettings) -> ssl.SSLContext | None:
    """For asking our own gateway on this machine how it is. Whose certificate it shows does not matter: nothing is told it.

    Where clients need certificates its own serves as ours, so it must be good for clients as well.
    """
    if not gateway.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if gateway.ssl_ca_certs:
        context.load_cert_chain(gateway.ssl_certfile, gateway.ssl_keyfile)
    return context


def _welcome(model: ResolvedModel, gateway: GatewaySettings, address: Address, took_s: float) -> str:
    name = gateway.served_model_name[0] if gateway.served_model_name else model.name
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": name, "messages": [message], "max_tokens": 64, "stream": True})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if gateway.api_key or gateway.api_key_file else ""
    return (
        f"Octavo is ready: {name} on {address.url} ({took_s:.1f} s). Try it:\n"
        f"curl -N {address.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )
