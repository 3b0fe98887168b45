"""The administrator's routes from HTTP to a real scheduler's core and back."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from gateway_stage import MODEL_FOLDER

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from service_stage import MODEL, Executor, open_stage
from service_stage import Stage as SchedulerStage

from octavo_gateway.serve import Server
from octavo_gateway.tokenizer import ModelTokenizer
from octavo_shared.settings import GatewaySettings, load_settings
from octavo_shared.streams import Streams

KEY = {"Authorization": "Bearer root"}
COLUMNS = ["block", "state", "references", "filled", "depth", "age_steps", "hits", "owners"]


class Scene:
    """A gateway and a scheduler on the same Valkey, and a client of the gateway."""

    def __init__(self, scheduler: SchedulerStage, client: httpx.AsyncClient) -> None:
        self.scheduler = scheduler
        self.client = client

    async def kv(self, **query: object) -> dict[str, Any]:
        answer = await self.client.get("/v1/kv", params=query, headers=KEY)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        page: dict[str, Any] = answer.json()
        assert page["object"] == "kv"
        assert list(page["columns"]) == COLUMNS
        assert len({len(column) for column in page["columns"].values()}) == 1
        return page

    async def reset(self) -> dict[str, Any]:
        answer = await self.client.post("/v1/cache/reset", headers=KEY)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ask(self, **body: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ready(self) -> None:
        """The scheduler has an executor and says so. (Readiness alone may be that of the scheduler before, which handed over.)"""
        async with asyncio.timeout(15):
            for path in ("/v1/kv", "/health/ready"):
                while (await self.client.get(path, headers=KEY)).status_code != 200:
                    await asyncio.sleep(0.05)


def act(redis_url: str, tmp_path: Path, scene: Callable[[Scene], Awaitable[None]], **scheduler: object) -> None:
    settings = load_settings(
        GatewaySettings,
        model=str(MODEL_FOLDER),
        served_model_name=[MODEL],
        redis_url=redis_url,
        port=0,
        admin_api_key=["root"],
    )
    server = Server(settings)

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve())

    async def main() -> None:
        streams = Streams.connect(redis_url, MODEL)
        stage = open_stage(redis_url, tmp_path, streams, **scheduler)
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as client:
                await scene(Scene(stage, client))
        finally:
            await stage.close()
            await streams.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        server.should_exit = True
        thread.join(20)


PROMPT = [*range(1, 41)]


def test_the_cache_is_seen_and_emptied(redis_url: str, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        async with s.scheduler.executor(beats=True) as executor:
            await s.ready()
            empty = await s.kv()
            assert (empty["executor"], empty["executors"], empty["tier"]) == ("e0", ["e0"], "device")
            assert (empty["start"], empty["next"]) == (0, None)
            assert empty["columns"]["block"] == list(range(16))
            assert set(empty["columns"]["state"]) == {"free"}
            totals = empty["totals"]
            assert (totals["num_blocks"], totals["block_size"], totals["free_blocks"]) == (16, 16, 16)
            assert totals["external_waste_tokens"] == 0

            executor.keep_working()
            await s.ask(prompt=PROMPT, max_tokens=4)
            page = await s.kv()
            cached = [at for at, state in enumerate(page["columns"]["state"]) if state == "cached"]
            assert sorted(page["columns"]["depth"][at] for at in cached) == [1, 2]
            assert all(page["columns"]["filled"][at] == 16 for at in cached)
            assert page["columns"]["owners"] == [[]] * 16
            assert (page["totals"]["cached_blocks"], page["totals"]["active_blocks"]) == (2, 0)

            # It is found while it is there, and not any more once it was emptied.
            await s.ask(prompt=PROMPT, max_tokens=4)
            page = await s.kv()
            assert sorted(page["columns"]["hits"][at] for at in cached) == [1, 1]
            assert await s.reset() == {"object": "cache.reset", "blocks": 2}
            assert (await s.kv())["totals"]["cached_blocks"] == 0
            await s.ask(prompt=PROMPT, max_tokens=4)
            assert [new.num_computed for new in executor.admitted] == [0, 32, 0]

    act(redis_url, tmp_path, scene)


def test_running_requests_own_blocks_and_outlive_a_reset(
    redis_url: str, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    async def scene(s: Scene) -> None:
        async with s.scheduler.executor(beats=True) as executor:
            await s.ready()
            asking = asyncio.create_task(s.ask(prompt=PROMPT, max_tokens=60, n=2))
            await executor.work(5)
            page = await s.kv()
            owned = {at: owners for at, owners in enumerate(page["columns"]["owners"]) if owners}
            assert all(page["columns"]["state"][at] == "active" for at in owned)
            assert all(page["columns"]["references"][at] == len(owners) for at, owners in owned.items())
            assert page["totals"]["active_blocks"] == len(owned)
            # Both choices name the two full blocks of their prompt; whose they are is told by the request's id.
            shared = [owners for owners in owned.values() if len(owners) == 2]
            assert len(shared) >= 2
            assert page["totals"]["shared_blocks"] == len(shared)
            assert (await s.reset())["blocks"] >= 2
            executor.keep_working()
            answer = await asking
            assert answer["usage"]["completion_tokens"] == 120
            request_id = answer["id"].removeprefix("cmpl-")
            assert sorted(shared[0]) == [f"{request_id}/0", f"{request_id}/1"]
            await s.ask(prompt=PROMPT, max_tokens=4)
            assert executor.admitted[-1].num_computed == 0, "what was computed before the reset is not found"

    act(redis_url, tmp_path, scene)


def test_pages(redis_url: str, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        async with (
            s.scheduler.executor(beats=True, num_device_blocks=40_000),
            Executor(s.scheduler.address, s.scheduler.streams, name="e1", num_device_blocks=20, num_host_blocks=7),
        ):
            await s.ready()
            async with asyncio.timeout(10):
                while len((await s.kv(limit=0))["executors"]) < 2:
                    await asyncio.sleep(0.05)
            seen, start = [], 0
            while start is not None:
                page = await s.kv(start=start, limit=16384, executor="e0")
                assert page["start"] == start
                seen += page["columns"]["block"]
                start = page["next"]
            assert seen == list(range(40_000))
            assert len((await s.kv(executor="e0"))["columns"]["block"]) == 1000
            assert (await s.kv(executor="e1", start=15))["columns"]["block"] == [15, 16, 17, 18, 19]
            assert (await s.kv(executor="e1", start=10**9))["columns"]["block"] == []
            host = await s.kv(executor="e1", tier="host", limit=5)
            assert (host["columns"]["block"], host["next"]) == ([0, 1, 2, 3, 4], 5)
            assert host["totals"]["host_blocks"] == 7
            unknown = await s.client.get("/v1/kv", params={"executor": "e2"}, headers=KEY)
            assert unknown.status_code == 400
            assert "e2" in unknown.json()["error"]["message"]
            assert (await s.client.get("/v1/kv", params={"tier": "disk"}, headers=KEY)).status_code == 400

    act(redis_url, tmp_path, scene)


def test_without_an_executor_there_is_nothing_to_see(redis_url: str, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        async with asyncio.timeout(15):
            # Until the scheduler has begun to answer.
            while (answer := await s.client.get("/v1/kv", headers=KEY)).status_code == 504:
                await asyncio.sleep(0.05)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "No executor is attached.")
        assert await s.reset() == {"object": "cache.reset", "blocks": 0}

    act(redis_url, tmp_path, scene)


@pytest.mark.parametrize("text", ["{", '{"id": "1", "kind": "nonsense", "until_s": 9e9}', '{"id":"1"}'])
def test_nonsense_on_the_channel_does_no_harm(
    redis_url: str, tokenizer: ModelTokenizer, tmp_path: Path, text: str
) -> None:
    async def scene(s: Scene) -> None:
        await s.scheduler.streams.client.rpush(s.scheduler.streams.keys.control, text)
        async with s.scheduler.executor(beats=True):
            await s.ready()
            assert (await s.kv(limit=1))["columns"]["block"] == [0]

    act(redis_url, tmp_path, scene)
