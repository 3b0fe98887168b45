"""A stage for the gateway: a real Valkey, the real protocol, and an engine that answers from a script.

The engine is scheduler and executor in one: it reads the model stream through its consumer group, appends tokens and
fences to the gateway's log, acts on aborts, acknowledges, and publishes limits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from redis.exceptions import RedisError

from octavo_gateway.serve import Server
from octavo_shared.entries import decode_request, encode_fences, encode_tokens
from octavo_shared.fold import FenceEvent, LogFold
from octavo_shared.ids import Attempt
from octavo_shared.plan import OutputRow
from octavo_shared.records import AbortRecord, EndReason, ModelLimits, Problem, RequestRecord, TokenLogprobs
from octavo_shared.settings import GatewaySettings, load_settings
from octavo_shared.streams import Streams

MODEL_FOLDER = (
    Path(os.environ.get("OCTAVO_HOME") or Path.home() / ".cache" / "octavo") / "models" / "SmolLM2-135M-Instruct"
)
VOCAB_SIZE = 49152
MAX_MODEL_LEN = 256
POOL_TOKENS = 4096
EOS = 2
TERM = 7


@dataclass
class Reply:
    """What the engine says for one choice: tokens in steps of the given sizes (then 1), then an end."""

    tokens: Sequence[int]
    end: EndReason = EndReason.LENGTH
    stop_token: int = -1
    sizes: Sequence[int] = ()
    problem: Problem | None = None
    # End by a fence (as a scheduler does) instead of in a token row.
    fence: bool = False
    # Do not go on before this is set.
    gate: threading.Event | None = None
    # Tokens before the gate.
    before_gate: int = 0
    # Log-probability of output tokens; default: see ``logprobs_of``.
    values: Sequence[float] | None = None
    # Prompt tokens found in the prefix cache; told with the first output.
    cached_tokens: int = 0


def logprobs_of(token: int, count: int, value: float | None = None) -> TokenLogprobs:
    """Made-up log-probabilities: the token itself first, then the ids after it."""
    own = -(token % 7) / 8 - 0.125 if value is None else value
    top = tuple((token + place, own - place) for place in range(count))
    return TokenLogprobs(own, 1, top)


@dataclass
class Live:
    """A choice in the engine."""

    record: RequestRecord
    choice: int
    reply: Reply
    at: int = 0
    steps: int = 0
    ended: bool = False


def default_reply(record: RequestRecord, choice: int) -> Reply:
    """The prompt backwards, over and over."""
    prompt = record.prompt[::-1].tolist()
    count = record.sampling.max_tokens
    return Reply((prompt * (count // len(prompt) + 1))[:count])


class Engine:
    """The scripted engine, in a thread of its own."""

    def __init__(self, redis_url: str, model: str, *, takes_over: bool = False, attempt: int = 1) -> None:
        self._url = redis_url
        self._takes_over = takes_over
        self._attempt = attempt
        self._model = model
        self.reply: Callable[[RequestRecord, int], Reply] = default_reply
        self.limits = ModelLimits(model, MAX_MODEL_LEN, POOL_TOKENS, VOCAB_SIZE, True, executors=1, term=TERM)
        self.publishing = True
        self.records: list[RequestRecord] = []
        self.aborts: list[AbortRecord] = []
        self.metrics = b"# HELP vllm:num_requests_running Running.\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n"
        self.acknowledging = True
        self.step_s = 0.0
        self._live: dict[tuple[str, int], list[Live]] = {}
        self._entries: dict[tuple[str, int], bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    @property
    def live(self) -> int:
        """Requests not yet acknowledged."""
        return len(self._live)

    async def _main(self) -> None:
        self._streams = Streams.connect(self._url, self._model)
        await self._streams.create_group()
        try:
            await asyncio.gather(self._publish(), self._take_requests(), self._take_aborts(), self._run())
        except (RedisError, OSError):
            # A test took Redis away.
            return
        await self._streams.close()

    async def _publish(self) -> None:
        while not self._stop.is_set():
            if self.publishing:
                await self._streams.publish_limits(self.limits)
                await self._streams.publish_metrics("scheduler", self.metrics)
            await asyncio.sleep(0.05)

    async def _take_requests(self) -> None:
        while not self._stop.is_set():
            taken = await self._streams.claim_pending("engine") if self._takes_over else []
            goes_on, self._takes_over = self._takes_over, False
            for entry_id, payload in taken or await self._streams.read_requests("engine", count=64, block_ms=100):
                record = decode_request(payload)
                self.records.append(record)
                key = (record.id.log, record.id.serial)
                self._entries[key] = entry_id
                self._live[key] = [Live(record, choice, self.reply(record, choice)) for choice in range(record.n)]
                if record.readmitted or goes_on:
                    await self._go_on(self._live[key])
                # As a scheduler: an abort may be there before its request.
                for abort in self.aborts:
                    if (abort.request_id.log, abort.request_id.serial) == key:
                        await self._abort(abort)

    async def _go_on(self, choices: list[Live]) -> None:
        """As a scheduler: what is in the log is not said again."""
        fold, after = LogFold(), "0"
        while (page := await self._streams.read_log(choices[0].record.id.log, after)).last_id != after:
            fold.apply_all(page.events)
            after = page.last_id
        for live in choices:
            state = fold.get(live.record.id.serial, live.choice)
            # An abort may have ended it meanwhile.
            live.at, live.ended = len(state.tokens), live.ended or bool(state.end)

    async def _take_aborts(self) -> None:
        after: bytes | str = "0-0"
        while not self._stop.is_set():
            for entry_id, abort in await self._streams.read_aborts(after, block_ms=100):
                after = entry_id
                assert abort is not None
                await self._streams.delete_aborts([entry_id])
                (followers,) = await self._streams.followers([abort.request_id])
                if abort.new_owner or abort.owner_generation < followers.generation:
                    continue
                self.aborts.append(abort)
                await self._abort(abort)

    async def _abort(self, abort: AbortRecord) -> None:
        for live in self._live.get((abort.request_id.log, abort.request_id.serial), []):
            if not live.ended and abort.choice in (-1, live.choice):
                await self._fence(live, EndReason.ABORT, None)

    async def _fence(self, live: Live, end: EndReason, problem: Problem | None) -> None:
        live.ended = True
        fence = FenceEvent(live.record.id.serial, live.choice, Attempt(TERM, 99), end, problem)
        await self._streams.append_log(live.record.id.log, encode_fences([fence]))

    async def _run(self) -> None:
        while not self._stop.is_set():
            rows: dict[str, list[OutputRow]] = defaultdict(list)
            for choices in list(self._live.values()):
                for live in choices:
                    if (row := await self._step(live)) is not None:
                        rows[live.record.id.log].append(row)
            for log, batch in rows.items():
                entry = encode_tokens(batch, term=TERM, executor="engine", epoch=1, step=1)
                await self._streams.append_log(log, entry)
            await self._acknowledge()
            await asyncio.sleep(self.step_s if rows else 0.002)

    async def _step(self, live: Live) -> OutputRow | None:
        reply = live.reply
        if live.ended or (reply.gate is not None and not reply.gate.is_set() and live.at >= reply.before_gate):
            return None
        sampling = live.record.sampling
        size = reply.sizes[live.steps] if live.steps < len(reply.sizes) else 1
        tokens = tuple(reply.tokens[live.at : live.at + size][: sampling.max_tokens - live.at])
        position, live.at, live.steps = live.at, live.at + len(tokens), live.steps + 1
        last = live.at >= min(len(reply.tokens), sampling.max_tokens)
        if last and reply.fence:
            if tokens:
                await self._append(live, position, tokens, EndReason.NONE)
            await self._fence(live, reply.end, reply.problem)
            return None
        live.ended = last
        return self._row(live, position, tokens, reply.end if last else EndReason.NONE)

    async def _append(self, live: Live, position: int, tokens: tuple[int, ...], end: EndReason) -> None:
        row = self._row(live, position, tokens, end)
        entry = encode_tokens([row], term=TERM, executor="engine", epoch=1, step=1)
        await self._streams.append_log(live.record.id.log, entry)

    def _row(self, live: Live, position: int, tokens: tuple[int, ...], end: EndReason) -> OutputRow:
        sampling, reply = live.record.sampling, live.reply
        logprobs = None
        if sampling.logprobs is not None:
            values = reply.values or [None] * len(reply.tokens)
            own = values[position : position + len(tokens)]
            logprobs = tuple(
                logprobs_of(token, sampling.logprobs, value) for token, value in zip(tokens, own, strict=True)
            )
        prompt = None
        if sampling.prompt_logprobs is not None and position == 0:
            prompt = tuple(logprobs_of(token, sampling.prompt_logprobs) for token in live.record.prompt[1:].tolist())
        return OutputRow(
            live.record.id,
            live.choice,
            self._attempt,
            position,
            tokens,
            end,
            reply.stop_token if end is EndReason.STOP else -1,
            logprobs,
            prompt,
            reply.problem if end is EndReason.ERROR else None,
            reply.cached_tokens if position == 0 else 0,
        )

    async def _acknowledge(self) -> None:
        if not self.acknowledging:
            return
        for key, choices in list(self._live.items()):
            if all(live.ended for live in choices):
                await self._streams.finish_request(self._entries.pop(key), choices[0].record)
                del self._live[key]


@dataclass
class Stage:
    """A gateway that listens, its engine, and a client."""

    server: Server
    engine: Engine
    client: httpx.Client
    settings: GatewaySettings
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return str(self.client.base_url)

    def check(self) -> None:
        """The gateway's own consistency check, run where its state cannot change meanwhile."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def check() -> None:
            try:
                self.server.gateway.reader.check_integrity()
                done.set_result(None)
            except AssertionError as error:
                done.set_exception(error)

        assert self.loop is not None
        self.loop.call_soon_threadsafe(check)
        done.result(10)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.client.post(path, json=body)

    def error(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """POST something that is refused; returns the error."""
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        assert set(answer.json()) == {"error"}
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def stream(self, path: str, **body: Any) -> list[str]:
        """POST a streaming request; returns the data of its events, without the final [DONE]."""
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read_events(answer.text)
        assert events[-1].data == "[DONE]"
        return [event.data for event in events[:-1]]


@dataclass(frozen=True)
class SseEvent:
    """A server-sent event: its id ("" = none) and its data."""

    id: str
    data: str


def read_events(text: str) -> list[SseEvent]:
    """The events of a stream, which must be whole."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) <= {"id", "data"}, block
        events.append(SseEvent(fields.get("id", ""), fields["data"]))
    return events


def eventually(condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> Any:
    """Wait until something holds; the limit only keeps a failing test from hanging.

    Asks ever less often: gateway and engine are threads of this process, and the more is asked the later they come to it.
    """
    end, pause_s = time.monotonic() + limit_s, 0.005
    while not (value := condition()):
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)
    return value


@contextmanager
def run_gateway(settings: GatewaySettings) -> Iterator[tuple[Server, asyncio.AbstractEventLoop]]:
    """A gateway in a thread, until the end."""
    server = Server(settings)
    loops: list[asyncio.AbstractEventLoop] = []

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loops.append(runner.get_loop())
            runner.run(server.serve())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    eventually(lambda: server.started, "the gateway listens")
    try:
        yield server, loops[0]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def second_gateway(stage: Stage, **flags: Any) -> Iterator[Stage]:
    """Another gateway beside the stage's, on the same log."""
    settings = stage.settings.model_copy(update=flags)
    with (
        run_gateway(settings) as (server, loop),
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30, headers=stage.client.headers) as client,
    ):
        eventually(lambda: client.get("/health/ready").status_code == 200, "the gateway is ready")
        yield Stage(server, stage.engine, client, settings, loop)


@contextmanager
def open_stage(redis_url: str, name: str, tls: ssl.SSLContext | None = None, **flags: Any) -> Iterator[Stage]:
    """A gateway in a thread and its engine, ready to serve; with ``tls`` the client speaks HTTPS."""
    flags = {"model": str(MODEL_FOLDER), "served_model_name": [name], "redis_url": redis_url, "port": 0, **flags}
    settings = load_settings(GatewaySettings, **flags)
    scheme, verify = ("http", True) if tls is None else ("https", tls)
    with (
        Engine(redis_url, name) as engine,
        run_gateway(settings) as (server, loop),
        httpx.Client(base_url=f"{scheme}://127.0.0.1:{server.port}", timeout=30, verify=verify) as client,
    ):
        eventually(lambda: client.get("/health/ready").status_code == 200, "the gateway is ready")
        yield Stage(server, engine, client, settings, loop)
