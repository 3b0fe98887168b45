"""Beam searches over the real log: what a scheduler that takes over finds, and that it ends what another one began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo_scheduler.core.beams import BeamRules, BeamSearch, Candidates
from octavo_scheduler.live import LiveRequest
from octavo_scheduler.recovery import Resumption, fence_and_read
from octavo_shared.entries import encode_beams, encode_fences, encode_snapshot, encode_tokens
from octavo_shared.fold import FenceEvent, LogFold
from octavo_shared.fold_beams import BeamFold
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import OutputRow
from octavo_shared.records import EndReason, RequestRecord, SamplingParams
from octavo_shared.streams import Streams

LOG = "gateway0"
EOS = 9
WIDTH, CHOICES = 3, 2
OLD_TERM, NEW_TERM = 1, 2


class Desk:
    """A scheduler's part in a beam search, on a real log."""

    def __init__(self, streams: Streams, live: LiveRequest, term: int, resumption: Resumption | None = None) -> None:
        self.streams = streams
        self.live = live
        attempt = Attempt(term, live.attempt_n)
        state = resumption.beams if resumption is not None else None
        self.search = BeamSearch(BeamRules.of(live.record, (EOS,), 64), live.record.id.serial, attempt, state)

    async def step(self) -> bytes:
        """One step of the search, logged; returns what was logged."""
        event = self.search.advance([candidates_after(one.tokens) for one in self.search.live])
        entry = encode_beams([event])
        await self.streams.append_log(LOG, entry)
        return entry


def candidates_after(tokens: tuple[int, ...]) -> Candidates:
    """A model of ten tokens: what comes next is a function of what was before."""
    logits = np.random.default_rng(tokens).normal(0, 2, 10)
    logprobs = (logits - np.logaddexp.reduce(logits)).astype(np.float32)
    order = np.argsort(-logprobs, kind="stable")
    return Candidates(order.astype(np.int32), logprobs[order])


def request(serial: int, beam_width: int = WIDTH) -> LiveRequest:
    sampling = SamplingParams(beam_width=beam_width, max_tokens=8, length_penalty=2.0)
    record = RequestRecord(RequestId(LOG, serial), 0, np.arange(5, dtype=np.int32), sampling, n=CHOICES)
    return LiveRequest(record, b"1-0", open=set(range(CHOICES)), attempt_n=1)


def fenced(state: BeamFold) -> BeamFold:
    """The same search, for the scheduler that takes over to go on with."""
    return replace(state, attempt=Attempt(NEW_TERM, 2))


def expected(live: LiveRequest) -> list[tuple[list[int], EndReason]]:
    """What a search that nothing happens to comes to."""
    search = BeamSearch(BeamRules.of(live.record, (EOS,), 64), 1, Attempt(1, 1))
    while not search.is_over:
        search.advance([candidates_after(one.tokens) for one in search.live])
    return [(list(one.tokens), one.end) for one in search.state.kept[:CHOICES]]


async def outcome(streams: Streams, serial: int) -> list[tuple[list[int], EndReason]]:
    log = LogFold().apply_all((await streams.read_log(LOG, "0", count=10_000)).events)
    return [(log.get(serial, choice).tokens, log.get(serial, choice).end) for choice in range(CHOICES)]


def play(scene: Callable[[Streams], Awaitable[None]], valkey: str) -> None:
    async def main() -> None:
        streams = Streams.connect(valkey, "tiny")
        await streams.client.flushall()
        try:
            await scene(streams)
        finally:
            await streams.close()

    asyncio.run(main())


@pytest.mark.parametrize("trimmed", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("steps", range(8))
def test_another_scheduler_ends_the_search(valkey: str, steps: int, trimmed: bool) -> None:
    """It dies after any number of steps, unsure of the last append; what it still had to say comes too late."""

    async def scene(streams: Streams) -> None:
        live = request(1)
        wanted = expected(live)
        first = Desk(streams, live, OLD_TERM)
        entry = b""
        while first.search.state.position < steps and not first.search.is_over:
            entry = await first.step()
        if entry:
            await streams.append_log(LOG, entry)
        if trimmed:
            page = await streams.read_log(LOG, "0", count=1000)
            snapshot = encode_snapshot(LogFold().apply_all(page.events).snapshots()) if page.events else b""
            await streams.trim_log(LOG, page.last_id, snapshot)
            assert await streams.client.xlen(streams.keys.log(LOG)) == (1 if snapshot else 0)
        (resumption,) = await fence_and_read(streams, [live], NEW_TERM)
        if first.search.is_over:
            assert (resumption.ended, resumption.outputs, resumption.beams) == ((0, 1), {}, None)
        else:
            assert resumption.ended == ()
            assert resumption.beams == (fenced(first.search.state) if steps else None)
            for choice, (tokens, _) in enumerate(wanted):
                assert tokens[: len(resumption.outputs[choice])] == resumption.outputs[choice]
            second = Desk(streams, live, NEW_TERM, resumption)
            while not second.search.is_over:
                if not first.search.is_over:
                    await first.step()
                await second.step()
        assert await outcome(streams, 1) == wanted

    play(scene, valkey)


def test_a_choice_that_had_ended_stays_ended(valkey: str) -> None:
    async def scene(streams: Streams) -> None:
        live = request(1)
        desk = Desk(streams, live, OLD_TERM)
        for _ in range(2):
            await desk.step()
        await streams.append_log(LOG, encode_fences([FenceEvent(1, 0, Attempt(OLD_TERM, 2), EndReason.ABORT)]))
        await desk.step()
        (resumption,) = await fence_and_read(streams, [live], NEW_TERM)
        assert resumption.ended == (0,)
        assert list(resumption.outputs) == [1]
        assert resumption.beams == fenced(desk.search.state)
        second = Desk(streams, live, NEW_TERM, resumption)
        while not second.search.is_over:
            await second.step()
        found = await outcome(streams, 1)
        assert found[0][1] is EndReason.ABORT
        assert found[1] == expected(live)[1]

    play(scene, valkey)


def test_a_scheduler_of_a_later_term_was_faster(valkey: str) -> None:
    async def scene(streams: Streams) -> None:
        live, same = request(1), request(1)
        await Desk(streams, live, OLD_TERM).step()
        (newest,) = await fence_and_read(streams, [live], NEW_TERM + 1)
        (late,) = await fence_and_read(streams, [same], NEW_TERM)
        assert late.beams is None
        second, third = Desk(streams, same, NEW_TERM, late), Desk(streams, live, NEW_TERM + 1, newest)
        while not third.search.is_over:
            if not second.search.is_over:
                await second.step()
            await third.step()
        assert await outcome(streams, 1) == expected(live)

    play(scene, valkey)


def test_searches_and_others_in_one_log_are_kept_apart(valkey: str) -> None:
    async def scene(streams: Streams) -> None:
        lives = [request(1), request(2, beam_width=0), request(3)]
        desks = [Desk(streams, lives[0], OLD_TERM), Desk(streams, lives[2], OLD_TERM)]
        await desks[0].step()
        row = OutputRow(RequestId(LOG, 2), 0, 1, 0, (5, 6))
        await streams.append_log(LOG, encode_tokens([row], term=OLD_TERM, executor="e", epoch=1, step=1))
        await desks[1].step()
        await desks[1].step()
        found = await fence_and_read(streams, lives, NEW_TERM)
        assert [one.live for one in found] == lives
        assert [one.beams for one in found] == [fenced(desks[0].search.state), None, fenced(desks[1].search.state)]
        assert found[1].outputs == {0: [5, 6], 1: []}

    play(scene, valkey)


class TrimmedAtOnce(Streams):
    """A log whose gateway reads each entry and trims the log behind it, before anyone else reads on."""

    async def append_log(self, log: str, entry: bytes) -> None:
        await super().append_log(log, entry)
        page = await self.read_log(log, "0", count=1000)
        snapshot = encode_snapshot(LogFold().apply_all(page.events).snapshots())
        assert await self.trim_log(log, page.last_id, snapshot)


@pytest.mark.parametrize("steps", range(8))
def test_the_log_is_trimmed_between_the_fence_and_its_reading(valkey: str, steps: int) -> None:
    """The fence is then part of the snapshot; a search that began anew would never be heard again."""

    async def scene(streams: Streams) -> None:
        live = request(1)
        wanted = expected(live)
        first = Desk(streams, live, OLD_TERM)
        while first.search.state.position < steps and not first.search.is_over:
            await first.step()
        (resumption,) = await fence_and_read(TrimmedAtOnce(streams.client, "tiny"), [live], NEW_TERM)
        if not first.search.is_over:
            second = Desk(streams, live, NEW_TERM, resumption)
            while not second.search.is_over:
                await second.step()
        assert await outcome(streams, 1) == wanted

    play(scene, valkey)
