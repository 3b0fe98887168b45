"""A fuzzer on the scheduler's port: whatever is said there, and in whichever order, executors that behave go on as if alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from service_stage import MODEL, Stage, play

from octavo_shared.plan import ExecutorInfo, StepResult
from octavo_shared.proto import executor_pb2 as pb
from octavo_shared.records import EndReason
from octavo_shared.wire import Heartbeat, Logged, Resync, to_scheduler

HELLO = ExecutorInfo("fuzz", "fuzz-1", MODEL, "f", 16, 16, 128, 8, 64, 1000)
HUGE = 65 << 20


def results(rng: random.Random) -> StepResult:
    rows = rng.choice([0, 1, 2, 7])
    counts = np.array([rng.randrange(4) for _ in range(rows)], np.int32)
    tokens = np.array([rng.randrange(-(1 << 31), 1 << 31) for _ in range(int(counts.sum()))], np.int64).astype(np.int32)
    ends = np.array([rng.randrange(256) for _ in range(rows)], np.uint8)
    step = rng.choice([0, 1, 2, 5, (1 << 63) - 1])
    return StepResult(
        rng.choice([0, 1, 2, 99]), rng.randrange(4), step, counts, tokens, ends, failed=rng.random() < 0.3
    )


def sayings(rng: random.Random) -> list[bytes]:
    """One message of each kind, the numbers in it drawn."""
    number = rng.choice([0, 1, 2, 99, 1 << 31, (1 << 63) - 1])
    messages = [
        to_scheduler(HELLO),
        to_scheduler(results(rng)),
        to_scheduler(Logged(rng.randrange(4), number)),
        to_scheduler(Heartbeat(rng.randrange(4), number, draining=rng.random() < 0.5)),
        to_scheduler(Resync(rng.randrange(4), number, "x" * rng.choice([0, 5, 100_000]))),
    ]
    said = [message.SerializeToString() for message in messages]
    known = {message.WhichOneof("kind") for message in messages}
    for field in pb.ExecutorMessage.DESCRIPTOR.fields:
        if field.name not in known and field.message_type is not None:
            # Of a kind that is not made above: empty, and full of noise.
            empty = pb.ExecutorMessage()
            getattr(empty, field.name).SetInParent()
            said.append(empty.SerializeToString())
    return said


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 5)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.randint(1, len(changed))] if rng.random() < 0.3 else changed)


def stranger(rng: random.Random) -> list[bytes]:
    """What a caller says that is never let in: noise, or an introduction that is refused."""
    wrong = pb.ExecutorMessage.FromString(to_scheduler(HELLO).SerializeToString())
    wrong.hello.model = "another"
    said = [rng.randbytes(rng.randrange(300)), wrong.SerializeToString(), *sayings(rng)[1:]]
    rng.shuffle(said)
    return [mutated(rng, one) if rng.random() < 0.5 and b"another" not in one else one for one in said]


def insider(rng: random.Random) -> list[bytes]:
    """What a caller says that is let in and then talks nonsense."""
    said = [one for _ in range(6) for one in sayings(rng)]
    rng.shuffle(said)
    said = [mutated(rng, one) if rng.random() < 0.4 else one for one in said]
    return [to_scheduler(HELLO).SerializeToString(), *said]


async def talk(address: str, rng: random.Random, said: list[bytes], *, hangs: bool = False) -> None:
    """Say it all; then hang up, properly or not."""

    async def messages() -> AsyncIterator[bytes]:
        for one in said:
            yield one
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        if hangs:
            await asyncio.sleep(0.5)

    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.stream_stream("/octavo.v1.Scheduler/Attach")(messages())
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(2):
                while await call.read() is not grpc.aio.EOF:
                    if rng.random() < 0.05:
                        call.cancel()


async def half_open(address: str, rng: random.Random) -> None:
    """Bytes that are no HTTP/2, or only its beginning; then silence."""
    _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    writer.write(
        rng.choice([preface, preface[:9], rng.randbytes(400), b"GET / HTTP/1.1\r\n\r\n", preface + rng.randbytes(100)])
    )
    with contextlib.suppress(OSError):
        await writer.drain()
    await asyncio.sleep(0.3)
    writer.close()


async def fuzz(stage: Stage, rng: random.Random, speech: Callable[[random.Random], list[bytes]], calls: int) -> None:
    for _ in range(calls // 5):
        await asyncio.gather(
            *(talk(stage.address, rng, speech(rng), hangs=rng.random() < 0.1) for _ in range(4)),
            half_open(stage.address, rng),
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_strangers_are_not_noticed(seed: int, valkey: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)

    async def scene(stage: Stage) -> None:
        await stage.listening()
        async with stage.executor() as executor:
            executor.keep_working()
            for serial in range(1, 30):
                await stage.admit(serial, max_tokens=20)
            await fuzz(stage, rng, stranger, 60)
            await talk(stage.address, rng, [b"\0" * HUGE])
            await talk(stage.address, rng, [to_scheduler(Resync(0, 0, "x" * (60 << 20))).SerializeToString()])
            await stage.admit(30, max_tokens=20)
            await stage.finish(executor)
            for serial in range(1, 31):
                assert await stage.fold(serial) == ([*range(100, 120)], EndReason.LENGTH)
            (engine,) = stage.service.engines
            assert engine.info.name == "e0"
            engine.core.check_integrity()

    with caplog.at_level(logging.WARNING):
        play(scene, valkey, tmp_path)
    assert "background task failed" not in caplog.text
    assert "could not be handled" not in caplog.text, "what makes no sense is refused, it is no accident"


@pytest.mark.parametrize("seed", [1, 2])
def test_insiders_who_talk_nonsense_take_nothing_with_them(
    seed: int, valkey: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may spoil requests they were given. They must leave nothing behind, and the scheduler must live."""
    rng = random.Random(seed)

    async def scene(stage: Stage) -> None:
        await stage.listening()
        async with stage.executor() as executor:
            executor.keep_working()
            for serial in range(1, 20):
                await stage.admit(serial, max_tokens=20)
            await fuzz(stage, rng, insider, 60)

            async def gone() -> bool:
                return [engine.info.name for engine in stage.service.engines] == ["e0"]

            await stage.until(gone)
            await stage.admit(1000, max_tokens=20)
            await stage.finish(executor)
            assert await stage.fold(1000) == ([*range(100, 120)], EndReason.LENGTH)
            assert len(stage.service.live) == 0
            (engine,) = stage.service.engines
            assert engine.core.num_running + engine.core.num_waiting == 0
            engine.core.check_integrity()

    with caplog.at_level(logging.WARNING):
        play(scene, valkey, tmp_path)
    assert "background task failed" not in caplog.text
