"""A Redis or Valkey of a test's own, at a Unix socket.

Not at a port: between finding a free one and listening on it another test process may take it, and then two tests empty
each other's server.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from octavo.embedded_redis import bundled_server

START_TIMEOUT_S = 60.0


def debians_redis() -> Path | None:
    """The redis-server on PATH, where there is one."""
    found = shutil.which("redis-server")
    return Path(found) if found is not None else None


class LogServer:
    """A server that can be taken away and come back. What it keeps in ``folder`` its ``flags`` say, which may
    change between two starts.

    ``binary`` is the bundled Valkey if nothing else is said.
    """

    def __init__(self, folder: Path, *flags: str, binary: Path | None = None, socket: Path | None = None) -> None:
        self.folder = folder
        self._binary = binary or bundled_server()
        self.flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._listen_at(socket or folder / "log.sock")

    def _listen_at(self, socket: Path) -> None:
        # Longer ones the system cuts off.
        assert len(str(socket)) < 100, socket
        self._socket = socket
        self.url = f"unix://{socket}"

    def start(self, socket: Path | None = None) -> LogServer:
        """Listen, at ``socket`` from now on if one is given; returns once it answers."""
        assert self._process is None
        if socket is not None:
            self._listen_at(socket)
        self._socket.unlink(missing_ok=True)
        common = ("--port", "0", "--unixsocket", self._socket, "--dir", self.folder, "--save", "")
        policy = ("--maxmemory-policy", "noeviction")
        with (self.folder / "log-server.log").open("ab") as said:
            command = [str(word) for word in (self._binary, *common, *policy, *self.flags)]
            self._process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log-server.log").read_text(errors="replace")
            assert time.monotonic() < deadline, f"{self._binary} does not answer"
            time.sleep(0.01)
        return self

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=5) as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def stop(self, *, kill: bool = False) -> None:
        """End it, as an operator does or as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            (process.kill if kill else process.terminate)()
            process.wait(30)
        self._socket.unlink(missing_ok=True)

    @property
    def append_only_file(self) -> Path:
        """Where it writes what it is told, from when it has made the file on."""
        (path,) = self.folder.glob("appendonlydir/*.incr.aof")
        return path

    def forget(self, size: int) -> bytes:
        """What a loss of power does, once it is stopped: only the first ``size`` bytes were on the disk; returns the others."""
        assert self._process is None
        with self.append_only_file.open("r+b") as file:
            file.seek(size)
            lost = file.read()
            file.truncate(size)
        return lost


@contextlib.contextmanager
def log_server(folder: Path, *flags: str, binary: Path | None = None) -> Iterator[str]:
    """One that runs as long as the context; yields its URL."""
    server = LogServer(folder, *flags, binary=binary).start()
    try:
        yield server.url
    finally:
        server.stop(kill=True)
