"""Running the gateway as a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
import uvloop

from octavo_gateway.app import create_app
from octavo_gateway.gateway import Gateway
from octavo_gateway.http_protocol import BoundedHttpProtocol
from octavo_shared.settings import GatewaySettings
from octavo_shared.telemetry import setup_logging
from octavo_shared.tls import https_requirement

# How long streams may take to hear of their end when the process is told to stop.
SHUTDOWN_S = 3
# How often to see whether the last stream has ended.
DRAIN_LOOK_S = 0.05

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A uvicorn server that ends what lives before it waits for connections to finish."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises SettingError when the model's folder, the key file or the certificates cannot be used."""
        requirement = https_requirement(settings)
        app = create_app(settings)
        self.gateway: Gateway = app.state.gateway
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
                ssl_ca_certs=settings.ssl_ca_certs,
                ssl_cert_reqs=requirement,
            )
        )

    @property
    def port(self) -> int:
        """The port listened on; only once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to ``run``: a stop that was asked for is no failure."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host = self.config.host
            scheme = "https" if self.config.is_ssl else "http"
            logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, self.port)

    def stop(self) -> None:
        """Take nothing new, let what lives end for up to ``--drain-timeout-s``, then stop. Said again, it stops at once."""
        if self.gateway.draining:
            self.should_exit = True
        else:
            self.gateway.draining = True
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.gateway.settings.drain_timeout_s
        logger.info("stopping: %d requests are being answered", len(self.server_state.tasks))
        while self.server_state.tasks and loop.time() < deadline and not self.should_exit:
            await asyncio.sleep(DRAIN_LOOK_S)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.dismiss()
        await super().shutdown(sockets)


def allow_many_connections() -> None:
    """Each is an open file, of which a process may have few unless it asks (setrlimit(2)): as many as it may ask for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(settings: GatewaySettings) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status after a clean stop.

    Raises:
        SettingError: the model's folder cannot be used.
    """
    setup_logging("gateway", settings.log_level)
    if settings.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    allow_many_connections()
    server = Server(settings)
    # What is there now stays for good: the collector need not walk the vocabulary again and again.
    gc.collect()
    gc.freeze()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        loop.add_signal_handler(signal.SIGHUP, partial(server.gateway.keys.reload, force=True))
        await server.serve()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    return 0
