"""The scheduler as a service: requests come in from the log, plans go out to executors, ends go back to the log.

One request's walk: ``Intake`` reads it from the model stream and hands it to ``accept``; it gets sequences on an engine
(or waits in the lobby while no executor is attached). Plans and results travel through the engine. An end that the executor
computed becomes final when the executor says its append succeeded (``logged``); an end that the scheduler decides (abort,
refusal) becomes final when the scheduler's own fence is in the log. After the last choice's end the request is acknowledged
and its entry deleted (rule L6).

Everything here runs on one asyncio loop: no locks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

from redis.exceptions import RedisError

from octavo_scheduler.backlog import Backlog
from octavo_scheduler.core.adoption import DoubtfulError
from octavo_scheduler.core.errors import IntegrityError, NeverFitsError
from octavo_scheduler.deadlines import Deadlines
from octavo_scheduler.engine import Engine, HangUp, Restart
from octavo_scheduler.limits import model_limits
from octavo_scheduler.live import LiveRequest, LiveRequests, Standing
from octavo_scheduler.metrics import SchedulerMetrics
from octavo_scheduler.observe import Observer
from octavo_scheduler.reading import read_request, remains_of, why_unservable
from octavo_scheduler.recovery import fence_and_read
from octavo_scheduler.searches import Searches
from octavo_scheduler.step_times import StepTimes
from octavo_scheduler.trials import Trials
from octavo_shared.entries import MalformedEntryError, encode_fences
from octavo_shared.fold import FenceEvent
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import CacheOffer, ExecutorInfo, StepResult
from octavo_shared.records import AbortRecord, EndReason, ModelLimits, Problem, RequestRecord
from octavo_shared.settings import SchedulerSettings
from octavo_shared.streams import Streams
from octavo_shared.wire import FromScheduler, Heartbeat, Logged

logger = logging.getLogger(__name__)

RETRY_S = 0.2
# Executors whose steps are remembered after they have left.
MOST_TIMES_KEPT = 256


class SchedulerService:
    """Live requests, engines, and the promises between them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        streams: Streams,
        observer: Observer,
        metrics: SchedulerMetrics,
        term: int,
        holder: str = "",
        life: str = "",
    ) -> None:
        """``holder`` is who holds the lease in this ``life`` of Redis; requests are acknowledged only while that is so."""
        self.settings = settings
        self.streams = streams
        self.observer = observer
        self.metrics = metrics
        self.term = term
        self._holder, self._life = holder, life
        # Requests up to this entry of the model stream may have been begun before, even if nothing says so any more: Redis
        # forgets who has read what more easily than what was logged.
        self.old_until = b"0-0"
        # The term that an executor has seen, if this one is no greater.
        self.outranked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._welcomed: set[str] = set()
        self.live = LiveRequests()
        self.engines: list[Engine] = []
        # Entries of the model stream from their reading to their acknowledgement.
        self._in_hand: set[bytes] = set()
        # Requests just read that somebody else may have begun.
        self._perhaps_begun: list[LiveRequest] = []
        # Requests that wait for an executor or for a trial to end, in order, with what they have put out so far.
        self._lobby: dict[RequestId, tuple[LiveRequest, Standing]] = {}
        # Which engine has the sequences of a request.
        self._homes: dict[RequestId, Engine] = {}
        self._trials = Trials(self)
        self._closed = False
        self._searches = Searches(self)
        self._deadlines = Deadlines(self._expire)
        self.backlog = Backlog()
        self._epoch = 0
        # What is known of the steps of executors, by their names, the last one heard of last.
        self._times: dict[str, StepTimes] = {}
        self._hash_key = secrets.token_bytes(16)
        self._background: set[asyncio.Task[None]] = set()

    # --- requests ---

    def accept(self, entry_id: bytes, payload: bytes) -> None:
        """A request was read from the model stream; it stays pending there until all its ends are logged."""
        live = self._take_on(entry_id, payload)
        if live is None:
            return
        if live.record.readmitted or _entry_time(entry_id) <= _entry_time(self.old_until):
            self._perhaps_begun.append(live)
            if len(self._perhaps_begun) == 1:
                self.spawn(self._take_up_what_came())
            return
        live.attempt_n = 1
        self._place(live, Standing())

    def _turn_away(self, entry_id: bytes, payload: bytes, why: MalformedEntryError) -> None:
        """An entry that is no request goes. If it can at least name itself somebody may be waiting: they hear of its end."""
        logger.warning("entry %s of the model stream is not a request (%s)", entry_id.decode(), why)
        remains = remains_of(payload)
        if remains is None or self.live.get(remains.id) is not None:
            self.spawn(self._finish(entry_id, None))
        else:
            self.spawn(self._end_unread(entry_id, remains))

    async def _end_unread(self, entry_id: bytes, remains: RequestRecord) -> None:
        # One failed choice fails the answer, however many it was to have.
        problem = Problem("The request cannot be understood by the scheduler.")
        fence = FenceEvent(remains.id.serial, 0, Attempt(self.term, 1), EndReason.ERROR, problem)
        await self.insist(partial(self.streams.append_log, remains.id.log, encode_fences([fence])))
        await self._finish(entry_id, remains)

    def entries_in_hand(self) -> frozenset[bytes]:
        """Entries of the model stream that have been read and are still to be acknowledged, as far as is known here."""
        return frozenset(self._in_hand)

    async def take_over(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Requests that an earlier term left pending: fence, read, resume. Called once, before anything is accepted."""
        taken = [self._take_on(entry_id, payload) for entry_id, payload in entries]
        lives = [live for live in taken if live is not None]
        if lives:
            logger.info("taking over %d requests", len(lives))
            await self._take_up(lives)

    async def _take_up_what_came(self) -> None:
        # All that were read together, in their order.
        lives, self._perhaps_begun = self._perhaps_begun, []
        await self._take_up(lives)

    async def _take_up(self, lives: list[LiveRequest]) -> None:
        """Requests that somebody else may have begun."""
        await self.insist(partial(self._learn_owners, lives))
        await self._resume(lives)

    async def _learn_owners(self, lives: list[LiveRequest]) -> None:
        owners = await self.streams.owners([live.record.id for live in lives])
        for live, owner in zip(lives, owners, strict=True):
            if owner is not None:
                live.generation, live.gateway = owner

    def _take_on(self, entry_id: bytes, payload: bytes) -> LiveRequest | None:
        """From now on a request is owed an end; None: it is none, or known already, and its entry goes."""
        self._in_hand.add(entry_id)
        try:
            record = read_request(payload)
        except MalformedEntryError as error:
            self._turn_away(entry_id, payload, error)
            return None
        if self.live.get(record.id) is not None:
            logger.warning("request %s is in the model stream twice; dropped once", record.id)
            self.spawn(self._finish(entry_id, None))
            return None
        live = LiveRequest(record, entry_id, open=set(range(record.n)))
        self.live.add(live)
        self.backlog.add(record)
        self._deadlines.add(record.id, record.deadline_us)
        return live

    def _expire(self, request_id: RequestId) -> None:
        """A deadline has passed: whatever has not ended ends where it stands."""
        live = self.live.get(request_id)
        if live is not None:
            self.end_choices(live, set(live.open), EndReason.TIMEOUT, None)

    def abort(self, record: AbortRecord) -> bool:
        """Someone no longer wants a choice, or all, or follows it now; False when the request is not known here (yet)."""
        live = self.live.get(record.request_id)
        if live is None:
            return False
        if record.new_owner:
            if record.owner_generation > live.generation:
                live.generation, live.gateway = record.owner_generation, record.new_owner
        elif record.owner_generation >= live.generation:
            choices = set(live.open) if record.choice < 0 else {record.choice} & live.open
            self.end_choices(live, choices, EndReason.ABORT, None, complete=record.reason == "stop_string")
        return True

    def _place(self, live: LiveRequest, standing: Standing) -> None:
        if live.open <= live.ending:
            return
        engine = self._trials.engine_for(live.record)
        if engine is None:
            self._lobby[live.record.id] = (live, standing)
            return
        problem = why_unservable(live.record, engine.info.vocab_size)
        try:
            if problem is None:
                self._start(live, engine, standing)
        except NeverFitsError as error:
            problem = Problem(str(error), 400, "BadRequestError", "context_length_exceeded", "input_tokens")
        if problem is not None:
            live.suspend()
            self.end_choices(live, set(live.open), EndReason.ERROR, problem)
            return
        self._homes[live.record.id] = engine
        self.pump(engine)

    def _start(self, live: LiveRequest, engine: Engine, standing: Standing) -> None:
        if live.record.sampling.beam_width:
            self._searches.start(live, engine, standing)
            return
        sequences = live.start(standing.outputs, engine.core.config.max_model_len)
        engine.core.add(sequences)
        for sequence in sequences:
            self.observer.arrived(sequence)

    def end_choices(
        self,
        live: LiveRequest,
        choices: set[int],
        reason: EndReason,
        problem: Problem | None,
        *,
        complete: bool = False,
    ) -> None:
        """End choices from here: let their blocks go now, and fence them with the end (the log decides who was first).

        ``complete``: they are as long as they would have become.
        """
        engine = self._homes.get(live.record.id)
        fenced = choices - live.ending
        first = b""
        if live.beams is not None:
            first = self._searches.let_go(live, fenced, reason, engine)
        elif engine is not None:
            for sequence in live.sequences:
                if sequence.choice not in fenced:
                    continue
                if engine.core.abort(sequence):
                    self.observer.left(sequence, reason)
                    self.backlog.learn(sequence, EndReason.STOP if complete else reason)
                else:
                    # Computed already; its own end is on its way into the log.
                    fenced.discard(sequence.choice)
        if fenced:
            live.ending |= fenced
            attempt = Attempt(self.term, live.attempt_n + 1)
            serial = live.record.id.serial
            fences = [FenceEvent(serial, choice, attempt, reason, problem) for choice in sorted(fenced)]
            self.spawn(self._log_ends(live.record.id, first, fences))
        if engine is not None:
            self.pump(engine)

    async def _log_ends(self, request_id: RequestId, first: bytes, fences: list[FenceEvent]) -> None:
        for entry in filter(None, (first, encode_fences(fences))):
            await self.insist(partial(self.streams.append_log, request_id.log, entry))
        for fence in fences:
            self.close(request_id, fence.choice)

    def close(self, request_id: RequestId, choice: int) -> None:
        """A choice's end is in the log."""
        if (live := self.live.get(request_id)) is not None and choice in live.open:
            self.backlog.choice_ended(request_id)
        finished = self.live.close(request_id, choice)
        if finished is not None:
            self._deadlines.forget(request_id)
            self._lobby.pop(request_id, None)
            self._homes.pop(request_id, None)
            self._acquit(request_id)
            self.spawn(self._finish(finished.entry_id, finished.record))

    async def _finish(self, entry_id: bytes, record: RequestRecord | None) -> None:
        async def finish() -> None:
            while not await self.streams.finish_request(entry_id, record, self._holder, self._life):
                # Either the lease is taken again soon, or this scheduler is no more.
                await asyncio.sleep(RETRY_S)

        await self.insist(finish)
        self._in_hand.discard(entry_id)

    async def insist(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Repeat an idempotent operation on the log until it succeeds."""
        while True:
            try:
                await operation()
                return
            except (RedisError, OSError) as error:
                logger.warning("the log is out of reach (%s); trying again", error)
                await asyncio.sleep(RETRY_S)

    # --- executors ---

    def attach(
        self,
        info: ExecutorInfo,
        send: Callable[[FromScheduler], None],
        restart: Restart,
        hang_up: HangUp,
    ) -> Engine:
        """An executor joined, or begins a new epoch: an engine of its own, not in use until ``ready``."""
        self._epoch += 1
        engine = Engine(
            info,
            self.settings,
            term=self.term,
            epoch=self._epoch,
            hash_key=self._hash_key,
            send=send,
            restart=restart,
            hang_up=hang_up,
        )
        # Steps of an executor of this name took as long before, most likely.
        engine.times = self._times.pop(info.name, engine.times)
        self._times[info.name] = engine.times
        while len(self._times) > MOST_TIMES_KEPT:
            del self._times[next(iter(self._times))]
        return engine

    def adopt(self, engine: Engine, offers: list[CacheOffer]) -> None:
        """What an executor's pages hold since an earlier term is found again, if it is beyond doubt."""
        if not offers:
            return
        try:
            adopted = engine.core.adopt(offers)
            engine.core.check_integrity()
        except (DoubtfulError, IntegrityError) as error:
            logger.warning("executor %s: its cache is not taken over (%s)", engine.info.name, error)
            engine.core.reset_prefix_cache()
            return
        self.metrics.count_adopted(adopted)
        logger.info("executor %s: %d cached blocks are taken over", engine.info.name, adopted)

    def outranks(self, info: ExecutorInfo) -> bool:
        """Is this term greater than every one that an executor has seen elsewhere? If not, another one will be taken."""
        seen = info.highest_term
        if seen < self.term or (seen == self.term and info.incarnation in self._welcomed):
            return True
        self._yield_to(seen)
        return False

    def _yield_to(self, term: int) -> None:
        if not self.outranked.done():
            self.outranked.set_result(term)

    def ready(self, engine: Engine) -> None:
        """The executor has been welcomed: plans may be sent from now on."""
        self._welcomed.add(engine.info.incarnation)
        self.engines.append(engine)
        config = engine.core.config
        logger.info(
            "executor %s attached: %d blocks of %d tokens, %.1f sequences of %d tokens at once",
            engine.info.name,
            config.num_blocks,
            config.block_size,
            config.max_concurrency,
            config.max_model_len,
        )
        self._rearrange()

    def _rearrange(self) -> None:
        """An executor has come, or a trial begins or is over: whoever waited for that may go."""
        self._trials.hold()
        waiting, self._lobby = self._lobby, {}
        for live, standing in waiting.values():
            self._place(live, standing)

    def _acquit(self, request_id: RequestId) -> None:
        """A request has ended: if it was the last one on trial, the others may go on."""
        if self._trials.forget(request_id):
            self._rearrange()

    def detach(self, engine: Engine, why: str, *, blame: bool = True) -> None:
        """An executor is gone, or its epoch is over: its requests resume elsewhere, or on the next that attaches.

        ``blame``: what it was computing may be the cause.
        """
        if engine not in self.engines or self._closed:
            return
        logger.log(logging.WARNING if blame else logging.INFO, "executor %s %s", engine.info.name, why)
        self.engines.remove(engine)
        self.observer.epoch_over(engine.core.epoch)
        lives = [live for live in self.live if self._homes.get(live.record.id) is engine]
        given_up = self._trials.failed(engine, lives) if blame else []
        for live in lives:
            self._homes.pop(live.record.id, None)
            for sequence in live.sequences:
                self.observer.left(sequence, EndReason.NONE)
            live.suspend()
        for live in given_up:
            problem = Problem(f"The request failed repeatedly: its executor {why}")
            self.end_choices(live, set(live.open), EndReason.ERROR, problem)
        if rest := [live for live in lives if live not in given_up]:
            self.spawn(self._resume(rest))
        self._rearrange()

    async def _resume(self, lives: list[LiveRequest]) -> None:
        while True:
            try:
                resumptions = await fence_and_read(self.streams, lives, self.term)
                break
            except (RedisError, OSError) as error:
                logger.warning("the log is out of reach (%s); resuming later", error)
                await asyncio.sleep(RETRY_S)
        for resumption in resumptions:
            live = resumption.live
            if resumption.outranked_by:
                # Rule L1: only if it is still current there. Somebody took a later term, or this one was given before.
                self._yield_to(resumption.outranked_by)
                return
            for choice in resumption.ended:
                self.close(live.record.id, choice)
            if self.live.get(live.record.id) is live:
                outputs = {c: tokens for c, tokens in resumption.outputs.items() if c in live.open}
                self._place(live, Standing(outputs, resumption.beams))

    def take_result(self, engine: Engine, result: StepResult) -> None:
        """A step is done on an executor."""
        engine.last_heard_s = time.monotonic()
        acknowledged = engine.take_result(result)
        epoch = engine.core.epoch
        # The next plan first: everything else can wait behind the forward pass.
        planned = engine.pump()
        engine.core.tidy()
        if self._trials.judge(engine):
            self._rearrange()
        self._searches.happened(engine, acknowledged.events)
        self.observer.acknowledged(epoch, result.step)
        self.observer.happened(acknowledged.events + planned, epoch)
        self.backlog.learn_all(acknowledged.events)
        self.metrics.observe_step(acknowledged.tokens, engine.plan_s, acknowledged.round_trip_s, result.timings)

    def take_logged(self, engine: Engine, logged: Logged) -> None:
        """Tokens and ends up to a step are in the log."""
        engine.last_heard_s = time.monotonic()
        for sequence in engine.take_logged(logged.step):
            self.close(sequence.request_id, sequence.choice)
        self._relieve(engine)

    def take_heartbeat(self, engine: Engine, heartbeat: Heartbeat) -> None:
        """An executor lives."""
        engine.take_heartbeat(heartbeat)
        if heartbeat.draining and not engine.draining:
            logger.info("executor %s wants to leave", engine.info.name)
            engine.draining = True
        self._relieve(engine)

    def _relieve(self, engine: Engine) -> None:
        """Let an executor that wants to leave go once no step of its is under way and all it has computed is logged."""
        if engine.is_relieved and engine in self.engines:
            self.detach(engine, "is relieved", blame=False)
            engine.say_farewell()

    def pump(self, engine: Engine) -> None:
        """Send what plans may be sent, since something has changed."""
        self.observer.happened(engine.pump(), engine.core.epoch)

    def check_integrity(self) -> None:
        """Check every core (it takes time: call it while nothing runs); one that is broken begins a new epoch."""
        for engine in list(self.engines):
            try:
                engine.core.check_integrity()
            except IntegrityError as error:
                self.metrics.count_breach()
                engine.restart(f"the scheduler's core is broken: {error}")

    # --- what others are told ---

    def limits(self) -> ModelLimits:
        """What gateways need to know."""
        return model_limits(self.settings, self.term, self.engines, self.backlog)

    def exposition(self) -> bytes:
        """Metrics in Prometheus' text format."""
        return self.metrics.exposition(self.engines, len(self._lobby), self.limits())

    @property
    def busy(self) -> bool:
        """Some request is owed an end."""
        return len(self.live) > 0

    async def shut_down(self) -> None:
        """This scheduler's word counts no longer: stop whatever is under way. Who comes next reads the log."""
        self._closed = True
        self._deadlines.close()
        for live in self.live:
            for sequence in live.sequences:
                self.observer.left(sequence, EndReason.NONE)
        while self._background:
            for task in self._background:
                task.cancel()
            await asyncio.wait(self._background, timeout=0.1)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Do something beside; what goes wrong is logged. Nothing is begun any more once the term is over."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task failed", exc_info=task.exception())


def _entry_time(entry_id: bytes) -> tuple[int, int]:
    """A stream's entry id as something that can be compared."""
    time_ms, _, sequence = entry_id.partition(b"-")
    return int(time_ms), int(sequence or 0)
