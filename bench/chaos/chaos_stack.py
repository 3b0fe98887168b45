"""The stack under test: Redis, schedulers, executors and gateways as processes of their own, a proxy on every line."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis.asyncio
from chaos_aof import AppendOnlyFile
from chaos_disk import SlowDisk
from chaos_http import Exchange
from chaos_process import Process
from chaos_proxy import Proxy

from octavo.embedded_redis import find_server
from octavo.stack import Address, accepts, http_ok

MODEL = "chaos"
READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each, and how little room they have."""

    schedulers: int = 2
    executors: int = 2
    gateways: int = 2
    blocks: int = 72
    lease_s: float = 3.0
    # Long enough for a client that hears nothing to find that out, short enough to see that nothing stays for good.
    resume_ttl_s: float = 40.0
    # As an operator sets it: longer than the longest answer. A client that cannot resume is aborted after it.
    drain_timeout_s: float = 60.0
    appendfsync: str = "always"


class ChaosStack:
    """Everything that runs. ``proxies`` are by name: ``executor0-redis``, ``executor0-scheduler``, ``client-gateway0`` …"""

    def __init__(self, folder: Path, model: Path, sizes: Sizes) -> None:
        self.folder = folder
        self.sizes = sizes
        self._model = model
        self._redis_port, *ports = _free_ports(1 + sizes.schedulers + sizes.gateways)
        self._scheduler_ports = ports[: sizes.schedulers]
        self._gateway_ports = ports[sizes.schedulers :]
        self.proxies: dict[str, Proxy] = {}
        self.append_only_file = AppendOnlyFile(folder / "redis" / "appendonlydir")
        self._watching: asyncio.Task[None] | None = None
        self.disk = SlowDisk(folder / "disk")
        self.redis = Process("redis", self._redis_command(), folder / "redis.log", self.disk.environment)
        self.schedulers: list[Process] = []
        self.executors: list[Process] = []
        self.gateways: list[Process] = []

    @property
    def services(self) -> list[Process]:
        """All but Redis."""
        return [*self.schedulers, *self.executors, *self.gateways]

    def gateway_port(self, index: int) -> int:
        """Where clients find a gateway (its proxy)."""
        return self.proxies[f"client-gateway{index % self.sizes.gateways}"].port

    def at_work(self) -> Process | None:
        """The scheduler that holds the lease (the others do not listen); None while none does."""
        for process, port in zip(self.schedulers, self._scheduler_ports, strict=True):
            if process.running and accepts(f"127.0.0.1:{port}"):
                return process
        return None

    def connect_redis(self) -> redis.asyncio.Redis:
        """A client of our own, past every proxy."""
        return redis.asyncio.Redis(host="127.0.0.1", port=self._redis_port)

    async def start(self) -> None:
        """Start everything; returns when requests can be served."""
        self.redis.start()
        self._watching = asyncio.create_task(self.append_only_file.watch())
        await _until(lambda: accepts(f"127.0.0.1:{self._redis_port}"), "Redis")
        for index in range(self.sizes.schedulers):
            name = f"scheduler{index}"
            address = f"127.0.0.1:{self._scheduler_ports[index]}"
            lease_s = str(self.sizes.lease_s)
            flags = {"scheduler_address": address, "scheduler_lease_s": lease_s, "executor_lease_s": lease_s}
            self.schedulers.append(await self._service("scheduler", name, flags))
        for index in range(self.sizes.executors):
            name = f"executor{index}"
            lines = [
                await self._proxy(f"{name}-scheduler{number}", lambda p=port: [p])
                for number, port in enumerate(self._scheduler_ports)
            ]
            flags = {
                "scheduler_address": ",".join(f"127.0.0.1:{line.port}" for line in lines),
                "executor_name": name,
                "num_gpu_blocks_override": str(self.sizes.blocks),
                "max_num_seqs": "16",
                "max_num_batched_tokens": "128",
                "num_threads": "1",
                "kv_offloading_size": "0.001" if index else "0",
            }
            self.executors.append(await self._service("executor", name, flags))
        for index, port in enumerate(self._gateway_ports):
            await self._proxy(f"client-gateway{index}", lambda p=port: [p])
            flags = {
                "host": "127.0.0.1",
                "port": str(port),
                "stream_resume_ttl": str(self.sizes.resume_ttl_s),
                "drain_timeout_s": str(self.sizes.drain_timeout_s),
            }
            self.gateways.append(await self._service("gateway", f"gateway{index}", flags))
        for process in self.services:
            process.start()
        await self.until_ready()

    async def until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every gateway says so."""
        for port in self._gateway_ports:
            await _until(partial(_is_ready, port), f"the gateway on {port}", timeout_s)

    async def is_whole(self) -> bool:
        """Whether every process runs, every gateway is ready and every executor is attached, at this moment."""
        if not all(process.running for process in self.services):
            return False
        ready = [await asyncio.to_thread(_is_ready, port) for port in self._gateway_ports]
        return all(ready) and await self._attached() >= self.sizes.executors

    async def _attached(self) -> int:
        try:
            async with Exchange(self._gateway_ports[0], "GET", "/metrics") as exchange:
                text = (await exchange.body()).decode()
        except (ConnectionError, TimeoutError):
            return 0
        return sum(
            int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith("octavo:executors{")
        )

    async def stop(self) -> dict[str, int]:
        """Stop everything, the last started first; exit statuses by name."""
        self.calm()
        if self._watching is not None:
            self._watching.cancel()
        statuses = {}
        for processes in (self.gateways, self.executors, self.schedulers, [self.redis]):
            for process, status in zip(processes, await asyncio.gather(*(p.stop() for p in processes)), strict=True):
                statuses[process.name] = status
        for proxy in self.proxies.values():
            await proxy.close()
        return statuses

    def calm(self) -> None:
        """Undo what a fault may have left behind."""
        self.disk.set(0.0)
        for process in [*self.services, self.redis]:
            process.resume()
        for proxy in self.proxies.values():
            proxy.delay_s = 0.0
            proxy.refuse(False)
            proxy.thaw()

    async def _service(self, kind: str, name: str, flags: dict[str, str]) -> Process:
        line = await self._proxy(f"{name}-redis", lambda: [self._redis_port])
        values = {
            "model": str(self._model),
            "served_model_name": MODEL,
            "redis_url": f"redis://127.0.0.1:{line.port}/0",
            **flags,
        }
        environment = {f"OCTAVO_{key.upper()}": value for key, value in values.items()}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        return Process(name, [sys.executable, "-m", f"octavo_{kind}"], self.folder / f"{name}.log", environment)

    async def _proxy(self, name: str, target: object) -> Proxy:
        proxy = Proxy(name, target)  # type: ignore[arg-type]
        await proxy.start()
        self.proxies[name] = proxy
        return proxy

    def _redis_command(self) -> list[str]:
        data = self.folder / "redis"
        data.mkdir()
        flags = {
            "port": self._redis_port,
            "bind": "127.0.0.1",
            "dir": data,
            "appendonly": "yes",
            "appendfsync": self.sizes.appendfsync,
            "save": "",
            "maxmemory-policy": "noeviction",
            "enable-debug-command": "local",
        }
        return [str(find_server()), *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]


def _is_ready(port: int) -> bool:
    return http_ok(Address("127.0.0.1", port), "/health/ready")


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def _until(question: object, what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not await asyncio.to_thread(question):  # type: ignore[arg-type]
        if loop.time() > deadline_s:
            raise TimeoutError(f"{what} was not ready within {timeout_s:g} s")
        await asyncio.sleep(0.1)
