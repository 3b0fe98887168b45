"""The scheduler as a service: requests come in from the log, plans go out to executors, ends go back to the log.

One request's walk: ``Intake`` reads it from the model stream and hands it to ``PendingEntries``; it gets sequences on an
engine (or waits in the lobby while no executor is attached). Plans and results travel through the engine. An end that the executor
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
from collections.abc import Callable
from functools import partial

from redis.exceptions import RedisError

from octavo_scheduler.background import RETRY_S, Background, insist
from octavo_scheduler.backlog import Backlog
from octavo_scheduler.core.adoption import DoubtfulError
from octavo_scheduler.core.errors import IntegrityError
from octavo_scheduler.deadlines import Deadlines
from octavo_scheduler.engine import Engine, HangUp, Restart
from octavo_scheduler.limits import model_limits
from octavo_scheduler.live import LiveRequest, LiveRequests, Standing
from octavo_scheduler.metrics import SchedulerMetrics
from octavo_scheduler.observe import Observer
from octavo_scheduler.pending import PendingEntries
from octavo_scheduler.placement import Placement
from octavo_scheduler.recovery import fence_and_read
from octavo_scheduler.searches import Searches
from octavo_scheduler.step_times import StepTimes
from octavo_shared.entries import encode_fences
from octavo_shared.fold import FenceEvent
from octavo_shared.ids import Attempt, RequestId
from octavo_shared.plan import CacheOffer, ExecutorInfo, StepResult
from octavo_shared.records import AbortRecord, EndReason, ModelLimits, Problem
from octavo_shared.settings import SchedulerSettings
from octavo_shared.streams import Streams
from octavo_shared.wire import FromScheduler, Heartbeat, Logged

logger = logging.getLogger(__name__)

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
    ) -> None:
        """``holder`` is who holds the lease; requests are acknowledged only while that is so."""
        self.settings = settings
        self.streams = streams
        self.observer = observer
        self.metrics = metrics
        self.term = term
        # The term that an executor has seen, if this one is no greater.
        self.outranked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._welcomed: set[str] = set()
        self.live = LiveRequests()
        self.pending = PendingEntries(self, holder)
        self.background = Background()
        self.engines: list[Engine] = []
        self.placement = Placement(self)
        self._searches = Searches(self)
        self._deadlines = Deadlines(self._expire)
        self.backlog = Backlog()
        self._epoch = 0
        # What is known of the steps of executors, by their names, the last one heard of last.
        self._times: dict[str, StepTimes] = {}
        self._hash_key = secrets.token_bytes(16)

    # --- requests ---

    def owe(self, live: LiveRequest) -> None:
        """From now on a request is owed its ends."""
        self.live.add(live)
        self.backlog.add(live.record)
        self._deadlines.add(live.record.id, live.record.deadline_us)

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
        if choices := live.heed(record):
            self.end_choices(live, choices, EndReason.ABORT, None, complete=record.reason == "stop_string")
        return True

    def start(self, live: LiveRequest, engine: Engine, standing: Standing) -> None:
        """Let a request run on an engine.

        Raises:
            NeverFitsError: the executor has no room for it.
        """
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
        engine = self.placement.engine_of(live.record.id)
        fenced = choices - live.ending
        # What it tells of how long outputs become.
        lesson = EndReason.STOP if complete else reason
        first = b""
        if live.beams is not None:
            first = self._searches.let_go(live, fenced, reason, lesson, engine)
        elif engine is not None:
            for sequence in live.sequences:
                if sequence.choice not in fenced:
                    continue
                if engine.core.abort(sequence):
                    self.observer.left(sequence, reason)
                    self.backlog.learn(sequence.num_outputs, lesson)
                else:
                    # Computed already; its own end is on its way into the log.
                    fenced.discard(sequence.choice)
        if fenced:
            live.ending |= fenced
            attempt = Attempt(self.term, live.attempt_n + 1)
            serial = live.record.id.serial
            fences = [FenceEvent(serial, choice, attempt, reason, problem) for choice in sorted(fenced)]
            self.background.spawn(self._log_ends(live.record.id, first, fences))
        if engine is not None:
            self.pump(engine)

    async def _log_ends(self, request_id: RequestId, first: bytes, fences: list[FenceEvent]) -> None:
        for entry in filter(None, (first, encode_fences(fences))):
            await insist(partial(self.streams.append_log, request_id.log, entry))
        for fence in fences:
            self.close(request_id, fence.choice)

    def close(self, request_id: RequestId, choice: int) -> None:
        """A choice's end is in the log."""
        if (live := self.live.get(request_id)) is not None and choice in live.open:
            self.backlog.choice_ended(request_id)
        finished = self.live.close(request_id, choice)
        if finished is not None:
            self._deadlines.forget(request_id)
            self.placement.forget(request_id)
            self.background.spawn(self.pending.finish(finished.entry_id, finished.record))

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
        engine.times.begin(info.measured)
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
        self.placement.rearrange()

    def detach(self, engine: Engine, why: str, *, blame: bool = True) -> None:
        """An executor is gone, or its epoch is over: its requests resume elsewhere, or on the next that attaches.

        ``blame``: what it was computing may be the cause.
        """
        if engine not in self.engines or self.background.is_closed:
            return
        logger.log(logging.WARNING if blame else logging.INFO, "executor %s %s", engine.info.name, why)
        self.engines.remove(engine)
        self.observer.epoch_over(engine.core.epoch)
        rest, given_up = self.placement.evict(engine, blame=blame)
        for live in (*rest, *given_up):
            for sequence in live.sequences:
                self.observer.left(sequence, EndReason.NONE)
            live.suspend()
        for live in given_up:
            problem = Problem(f"The request failed repeatedly: its executor {why}")
            self.end_choices(live, set(live.open), EndReason.ERROR, problem)
        if rest:
            self.background.spawn(self.resume(rest))
        self.placement.rearrange()

    async def resume(self, lives: list[LiveRequest]) -> None:
        """Give requests a new attempt each: fence, read, go on from there."""
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
                self.placement.place(live, Standing(outputs, resumption.beams))

    def take_result(self, engine: Engine, result: StepResult) -> None:
        """A step is done on an executor."""
        engine.last_heard_s = time.monotonic()
        acknowledged = engine.take_result(result)
        epoch = engine.core.epoch
        # The next plan first: everything else can wait behind the forward pass.
        planned = engine.pump()
        engine.core.tidy()
        self.placement.judge(engine)
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
        return self.metrics.exposition(self.engines, self.placement.num_waiting, self.limits())

    @property
    def busy(self) -> bool:
        """Some request is owed an end."""
        return len(self.live) > 0

    async def shut_down(self) -> None:
        """This scheduler's word counts no longer: stop whatever is under way. Who comes next reads the log."""
        self._deadlines.close()
        for live in self.live:
            for sequence in live.sequences:
                self.observer.left(sequence, EndReason.NONE)
        await self.background.close()
