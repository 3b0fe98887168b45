"""One attached executor: the core that plans for it, and what its acknowledgements mean for requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo_scheduler.backlog import Progress, Rate
from octavo_scheduler.core.beam_groups import blocks_of_beams
from octavo_scheduler.core.config import CoreConfig
from octavo_scheduler.core.events import Admitted, Chunk, Ended, Event
from octavo_scheduler.core.scheduler import Scheduler
from octavo_scheduler.core.sequence import Sequence as CoreSequence
from octavo_scheduler.step_times import StepTimes
from octavo_shared.plan import ExecutorInfo, StepResult
from octavo_shared.records import RequestRecord
from octavo_shared.settings import SchedulerSettings
from octavo_shared.wire import Farewell, FromScheduler, Heartbeat


def core_config(info: ExecutorInfo, settings: SchedulerSettings) -> CoreConfig:
    """The core's sizes: the executor's, lowered by what the operator asked of the scheduler."""
    max_num_seqs = min(info.max_num_seqs, settings.max_num_seqs or info.max_num_seqs)
    budget = min(info.max_num_batched_tokens, settings.max_num_batched_tokens or info.max_num_batched_tokens)
    return CoreConfig(
        num_blocks=info.num_device_blocks,
        block_size=info.block_size,
        max_num_seqs=min(max_num_seqs, budget),
        max_num_batched_tokens=budget,
        max_model_len=min(info.max_model_len, info.num_device_blocks * info.block_size),
        num_host_blocks=info.num_host_blocks,
        eos_token_ids=info.eos_token_ids,
        fingerprint=info.fingerprint,
        policy=settings.scheduling_policy,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        run_ahead=info.run_ahead,
        prefix_cache_scope=settings.prefix_cache_scope,
        tenant_weights=settings.tenant_weights,
    )


# An executor that says nothing for this long, not even a heartbeat (one a second), does not count as ready.
SILENCE_S = 3.0
# One that has plans and is in no step for this long has lost them.
IDLE_S = 4.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a step may last: ``times`` as long as expected, but at least ``least_s``; ``unknown_s`` while nothing is."""

    least_s: float
    times: float
    unknown_s: float


# Who makes others wait longer does not count as ready; gateways hear of it within a second more. The longest honest steps are
# whole-budget prefills on a slow CPU, and the first ones of a process.
SLOW = Patience(2.5, 8.0, 60.0)
# Without --step-timeout-s: who makes others wait longer is let go.
STUCK = Patience(30.0, 20.0, 300.0)


# Running beside one more sequence costs about as much as computing so many tokens of a prompt.
COMPANY_TOKENS = 64


class Restart(Protocol):
    """Begins a new epoch with an executor."""

    def __call__(self, why: str, *, blame: bool = True) -> None:
        """``blame``: what it was computing may be the cause."""
        ...


class HangUp(Protocol):
    """Ends the call with an executor that is lost."""

    def __call__(self, why: str, *, stuck: bool = False) -> None:
        """``stuck``: it speaks, but does not come out of its step."""
        ...


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a step's result brought, the seconds from sending its plan to hearing its result, and the step's tokens.

    ``tokens`` are counted as vLLM counts an iteration's: prompt tokens computed plus tokens drawn.
    """

    events: list[Event]
    round_trip_s: float
    tokens: int


class Engine:
    """Plans for one executor in one epoch.

    ``send`` hands a message to the wire; it never blocks. ``restart`` begins a new epoch with the same executor, and is told
    why, and whether what it was computing is to ``blame``: the requests resume from the log. ``hang_up`` ends the call with an executor that is lost, and is told why.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        settings: SchedulerSettings,
        *,
        term: int,
        epoch: int,
        hash_key: bytes,
        send: Callable[[FromScheduler], None],
        restart: Restart,
        hang_up: HangUp,
    ) -> None:
        self.info = info
        self.restart = restart
        self.hang_up = hang_up
        self.core = Scheduler(core_config(info, settings), term=term, epoch=epoch, hash_key=hash_key)
        self._send = send
        # Ends that are computed but not yet known to be in the log: (step, sequence), in the order of steps.
        self._unlogged: deque[tuple[int, CoreSequence]] = deque()
        # Per unacknowledged plan: when it was sent, the prompt tokens it computes, how many sequences it draws for, and to how
        # many tokens all of its tokens attend.
        self._sent: deque[tuple[float, int, int, float]] = deque()
        self.last_heard_s = time.monotonic()
        self._last_progress_s = time.monotonic()
        # What it last said of itself: how long the step it is in has lasted (seconds), 0 between steps.
        self.step_s = 0.0
        self._logged_step = 0
        self.plan_s = 0.0
        self.draining = False
        self.rate = Rate()
        # What steps take.
        self.times = StepTimes()
        # Sequences that end in a second of work.
        self._ends = Rate()
        # When the newest result came, on the clock of _sent.
        self._result_at = 0.0

    def pump(self) -> list[Event]:
        """Send every plan that may be sent now; returns what happened meanwhile."""
        start = time.perf_counter()
        events: list[Event] = []
        if not self._sent and not self.core.num_waiting:
            self._last_progress_s = time.monotonic()
        while not self.draining and (plan := self.core.schedule()) is not None:
            if not self._sent:
                self._last_progress_s = time.monotonic()
            self._send(plan)
            fresh = self.core.drain_events()
            prompt_tokens = 0
            for event in fresh:
                if isinstance(event, Chunk):
                    prompt_tokens += event.count
                elif isinstance(event, Admitted):
                    self.times.observe_lookup(event.num_tokens, event.cached_tokens)
            attended_tokens = float(np.dot(plan.row_tokens, plan.row_starts + plan.row_tokens / 2))
            self._sent.append((time.perf_counter(), prompt_tokens, len(plan.sample_slots), attended_tokens))
            events += fresh
        self.plan_s = time.perf_counter() - start
        return events + self.core.drain_events()

    def take_result(self, result: StepResult) -> Acknowledged:
        """Take a step's result in.

        Raises:
            OutOfStepError: it does not answer the oldest unacknowledged plan.
        """
        self.core.commit(result)
        events = self.core.drain_events()
        ended = [(event.step, event.sequence) for event in events if isinstance(event, Ended)]
        self._unlogged += ended
        self._last_progress_s = time.monotonic()
        sent_at, prompt_tokens, sequences, _ = self._sent.popleft()
        now = time.perf_counter()
        # Of a beam's candidates one token's worth of work is done, whatever their number.
        drawn = np.count_nonzero(result.sample_counts) if len(result.scores) else len(result.tokens)
        tokens = prompt_tokens + int(drawn)
        # Plans wait for each other: this one has been worked on only since the one before it was done.
        seconds = now - max(sent_at, self._result_at)
        self.rate.observe(tokens, seconds)
        self.times.observe(prompt_tokens, sequences, seconds)
        self._ends.observe(len(ended), seconds)
        self._result_at = now
        return Acknowledged(events, now - sent_at, tokens)

    def take_logged(self, step: int) -> list[CoreSequence]:
        """Everything up to ``step`` is in the log: the sequences whose ends are final by that."""
        final = []
        self._logged_step = max(self._logged_step, step)
        while self._unlogged and self._unlogged[0][0] <= step:
            final.append(self._unlogged.popleft()[1])
        return final

    @property
    def is_relieved(self) -> bool:
        """It is leaving and owes nothing more: every plan has its result, and every token is in the log."""
        return self.draining and not self._sent and self._logged_step >= self.core.step

    def say_farewell(self) -> None:
        """It may go."""
        self._send(Farewell())

    def take_heartbeat(self, heartbeat: Heartbeat) -> None:
        """What it says of itself, about once a second."""
        self.last_heard_s = time.monotonic()
        self.step_s = heartbeat.step_s

    def is_making_progress(self, now_s: float) -> bool:
        """It speaks, and what it has been given it works on. ``now_s`` is in seconds of the monotonic clock."""
        return now_s - self.last_heard_s < SILENCE_S and not self.stalled(now_s, SLOW)

    def stalled(self, now_s: float, patience: Patience) -> str:
        """Why it gets nowhere; empty while it does, or has nothing to do. A long step is honest as far as ``patience`` goes."""
        waited_s = now_s - self._last_progress_s
        if self._sent:
            if self.step_s and waited_s > self._longest_s(patience):
                return f"its step has lasted {waited_s:.0f} s{self._expectation()}"
            return (
                "" if self.step_s or waited_s <= IDLE_S else f"it has had a plan for {waited_s:.0f} s and is in no step"
            )
        if self.core.num_waiting and not self.draining and waited_s > self._longest_s(patience):
            return f"{self.core.num_waiting} sequences wait and nothing has been planned for {waited_s:.0f} s"
        return ""

    @property
    def _expected_s(self) -> float:
        """What the step under way is expected to take; 0 when there is none, or too little is known."""
        return self.times.expected_s(*self._sent[0][1:]) if self._sent and self.times.foretells else 0.0

    def _longest_s(self, patience: Patience) -> float:
        if not self.times.foretells:
            return patience.unknown_s
        return max(patience.least_s, patience.times * self._expected_s)

    def _expectation(self) -> str:
        expected_s = self._expected_s
        return f" ({expected_s:.2g} s were expected)" if expected_s else ""

    # --- what a newcomer has to expect ---

    @property
    def next_step_s(self) -> float:
        """Seconds that a step of all that run and one more takes."""
        return self.times.decode_s(self.core.num_running + 1)

    def slot_wait_s(self, mean_output: float) -> float:
        """Seconds until a newcomer gets a slot and memory: 0 while there are some, or while nothing is known of it.

        Sequences are expected to make ``mean_output`` tokens. How many end in a second says little while those that run have
        all just begun: hardly any has come to its end. So all of them count beside, in the time they are expected to take.
        """
        core = self.core
        head = core.waiting.peek()
        if head is None or (core.table.num_free and core.refused[0] != head.uid):
            return 0.0
        pace = self._ends.beside(core.num_running, mean_output * self.next_step_s)
        return core.num_waiting / pace if pace else 0.0

    def progress(self) -> Iterator[Progress]:
        """How far each running sequence has come."""
        table = self.core.table
        for sequence, planned in zip(table.running, table.planned[: len(table)].tolist(), strict=True):
            yield Progress(sequence.request_id, sequence.output_start, planned)

    def has_room_for(self, record: RequestRecord) -> bool:
        """Whether a request can run here to its full length, if it is alone."""
        config, sampling = self.core.config, record.sampling
        if len(record.prompt) + sampling.max_tokens > config.max_model_len:
            return False
        if not sampling.beam_width:
            return True
        blocks = blocks_of_beams(record, config.block_size, config.max_model_len)
        return sampling.beam_width <= config.max_num_seqs and blocks <= config.num_blocks

    @property
    def load(self) -> int:
        """Sequences it has, running or waiting."""
        return self.core.num_running + self.core.num_waiting


def choose_engine(engines: Sequence[Engine], now_s: float, *records: RequestRecord) -> Engine | None:
    """Where requests go: of executors that are not leaving the one where they cost least; one that is stuck only if all are.

    What they cost is the prompt tokens that an executor has not cached, and the company they would have there. First of all
    they must have room (of executors without, the one that runs the longest sequences).
    """
    candidates = [engine for engine in engines if not engine.draining]
    if len(candidates) < 2:
        return candidates[0] if candidates else None

    def cost(engine: Engine) -> tuple[int, bool, int]:
        has_room = all(engine.has_room_for(record) for record in records)
        cached = sum(engine.core.prefix_cache.count_cached(record) for record in records)
        lack = 0 if has_room else most - engine.core.config.max_model_len + 1
        return lack, not engine.is_making_progress(now_s), COMPANY_TOKENS * engine.load - cached

    most = max(engine.core.config.max_model_len for engine in candidates)

    return min(candidates, key=cost)
