"""Garbage in the streams: it goes away without a trace, whoever can be named gets an end, and others do not notice."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path

import numpy as np
import pytest
from service_stage import LOG, Stage, play

from octavo_scheduler.reading import read_request, remains_of, why_unservable
from octavo_shared.entries import MalformedEntryError, encode_abort, encode_fences, encode_request
from octavo_shared.fold import FenceEvent
from octavo_shared.ids import MOST_TERM, Attempt, RequestId
from octavo_shared.proto import request_pb2
from octavo_shared.records import AbortRecord, EndReason, RequestRecord, SamplingParams
from octavo_shared.streams import FIELD


def request(serial: int = 1, **sampling: object) -> request_pb2.RequestRecord:
    params = SamplingParams(max_tokens=4, stop_token_ids=(7,), logit_bias=((3, 1.0),), logprobs=2, **sampling)  # type: ignore[arg-type]
    record = RequestRecord(RequestId(LOG, serial), time.time_ns() // 1000, np.arange(10, dtype=np.int32), params)
    return request_pb2.RequestRecord.FromString(encode_request(record))


def broken(serial: int, **fields: object) -> bytes:
    message = request(serial)
    for name, value in fields.items():
        target = message if hasattr(message, name) else message.sampling
        if isinstance(value, list):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message.SerializeToString()


NAN, INF = float("nan"), float("inf")
FAULTS: list[dict[str, object]] = [
    {"prompt": b""}, {"prompt": b"123"}, {"prompt": np.array([-1], "<i4").tobytes()}, {"n": 0}, {"n": 1 << 31},
    {"beam_width": 1 << 31}, {"temperature": NAN}, {"temperature": -1.0}, {"temperature": INF}, {"top_p": 7.0}, {"top_p": NAN},
    {"min_p": -1.0}, {"presence_penalty": NAN}, {"frequency_penalty": INF}, {"repetition_penalty": -1.0}, {"length_penalty": NAN},
    {"top_k": -5}, {"max_tokens": 0}, {"max_tokens": -1}, {"min_tokens": -1}, {"logprobs": -1}, {"prompt_logprobs": -7},
    {"stop_token_ids": [-1]}, {"logit_bias_ids": [1, 2]}, {"logit_bias_values": [NAN]}, {"tenant_weight": NAN},
    {"tenant_weight": -1.0}, {"early_stopping": 99}, {"places": 1 << 31}, {"place": 5}, {"place": 1 << 30, "places": 1 << 31},
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_means_nothing_is_not_believed(fault: dict[str, object]) -> None:
    read_request(request().SerializeToString())
    with pytest.raises(MalformedEntryError):
        read_request(broken(1, **fault))
    remains = remains_of(broken(1, **fault))
    assert remains is not None
    assert remains.id == RequestId(LOG, 1)
    assert len(remains.siblings) < 1 << 17


def test_what_is_out_of_vocabulary() -> None:
    def reason(vocab_size: int, **fields: object) -> str:
        problem = why_unservable(read_request(broken(1, **fields)), vocab_size)
        return "" if problem is None else problem.message

    assert reason(10) == ""
    assert reason(9) == "Token id 9 in prompt is out of vocabulary"
    assert reason(100, stop_token_ids=[100]) == "Token id 100 in stop_token_ids is out of vocabulary"
    assert reason(100, logit_bias_ids=[100]) == "Token id 100 in logit_bias is out of vocabulary"
    assert reason(100, prompt_logprobs=101) == "prompt_logprobs must be at most 100, got 101."


def test_those_who_can_be_named_get_an_end(valkey: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        client, keys = stage.streams.client, stage.streams.keys
        await stage.listening()
        async with stage.executor() as executor:
            executor.keep_working()
            entries = {serial: broken(serial, **fault) for serial, fault in enumerate(FAULTS, 100)}
            # One that is all right but for this executor's vocabulary of 1000.
            entries[99] = broken(99, stop_token_ids=[5000])
            for serial, entry in entries.items():
                # As admission does.
                entry_id = await client.xadd(keys.requests, {FIELD: entry})
                await client.hset(keys.request(RequestId(LOG, serial)), "entry", entry_id)
            await stage.admit(1)
            await stage.finish(executor)
        assert await stage.fold(1) == ([100, 101, 102, 103], EndReason.LENGTH)
        for serial in entries:
            assert await stage.fold(serial) == ([], EndReason.ERROR), serial

    play(scene, valkey, tmp_path)
    assert "background task failed" not in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_noise(valkey: str, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    serials = iter(range(1000, 9000))

    def noise(valid: bytes) -> bytes:
        kind = rng.randrange(5)
        if kind == 0:
            return rng.randbytes(rng.choice([0, 1, 7, 200, 5000]))
        data = bytearray(valid)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if kind == 1:
            del data[rng.randrange(len(data)) :]
        return bytes(data)

    async def scene(stage: Stage) -> None:
        client, keys = stage.streams.client, stage.streams.keys
        async with stage.executor() as executor:
            executor.keep_working()
            served = []
            for _ in range(150):
                await client.xadd(keys.requests, {FIELD: noise(request(next(serials)).SerializeToString())})
                await client.xadd(keys.requests, {b"other": rng.randbytes(5)})
                abort = encode_abort(AbortRecord(RequestId(LOG, 10**6), 0, 0, "x"))
                await client.xadd(keys.aborts, {FIELD: noise(abort)})
                await client.xadd(keys.log(LOG), {FIELD: noise(b"\x0a\x05hello" * 5)})
                await client.rpush(keys.control, noise(b'{"id": "x", "kind": "kv", "until_s": 1e12, "payload": {}}'))
                if rng.random() < 0.1:
                    served.append(next(serials))
                    await stage.admit(served[-1])
            await stage.finish(executor)

            async def nothing_left() -> bool:
                return await client.xlen(keys.aborts) == 0 and await client.llen(keys.control) == 0

            await stage.until(nothing_left)
            for serial in served:
                assert await stage.fold(serial) == ([100, 101, 102, 103], EndReason.LENGTH)
            assert len(stage.service.live) == 0
            assert not stage.service.pending.in_hand()
            (engine,) = stage.service.engines
            assert engine.core.num_running + engine.core.num_waiting == 0
            engine.core.check_integrity()

    with caplog.at_level(logging.WARNING):
        play(scene, valkey, tmp_path)
    assert "background task failed" not in caplog.text, f"seed {seed}"


@pytest.mark.parametrize(
    "attempt", [Attempt((1 << 64) - 1, 0), Attempt(1 << 63, 7), Attempt(1 << 40, 1), Attempt(1, 1 << 31)]
)
def test_a_poisoned_fence_holds_no_request_up_for_ever(valkey: str, tmp_path: Path, attempt: Attempt) -> None:
    """One that can be none is not read; one that could be is outranked by the next term."""

    async def scene(stage: Stage) -> None:
        async with stage.executor() as executor:
            await stage.admit(1, max_tokens=6)
            await executor.work(2)
            await stage.streams.append_log(LOG, encode_fences([FenceEvent(1, 0, attempt)]))
        # Whoever takes it on next finds the fence.
        term = stage.service.term
        async with stage.executor(incarnation="e0-2") as executor:
            if attempt.term <= MOST_TERM and attempt > (term, 2):
                await stage.until(lambda: is_later(stage, attempt.term))
        async with stage.executor(incarnation="e0-3", highest_term=stage.service.term - 1) as executor:
            await stage.finish(executor)
            assert await stage.fold(1) == ([100, 101, 102, 103, 104, 105], EndReason.LENGTH)

    async def is_later(stage: Stage, term: int) -> bool:
        return stage.service.term > term

    play(scene, valkey, tmp_path)
