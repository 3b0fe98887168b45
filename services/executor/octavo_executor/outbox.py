"""Tokens on their way into the log: in order, the oldest retried first, never dropped (rule L3).

A thread of its own appends, so the forward pass does not wait for Redis; only when the outbox is full does stepping stop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from octavo_shared.connections import connect_blocking
from octavo_shared.entries import encode_tokens
from octavo_shared.keys import Keys
from octavo_shared.plan import OutputRow
from octavo_shared.streams import FIELD

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
# What was appended within so many seconds is appended again when Redis has been restarted (rule L9): its append-only file,
# written every second, may have missed that. At most so many steps are kept for it.
RESEND_S = 5.0
MOST_KEPT = 4096
# How often to ask which life of Redis this is.
_ASK_S = 0.5


@dataclass(frozen=True, slots=True)
class StepAppend:
    """What one step appends: output rows of any logs."""

    term: int
    epoch: int
    step: int
    rows: tuple[OutputRow, ...]


class Outbox:
    """Appends steps in order.

    ``logged`` is called (from the outbox's thread) with (epoch, step) after each success; ``broken`` when something went
    wrong that trying again cannot mend: the executor must end then, since what it computes would reach nobody.

    A Redis that has been restarted is told once more what it was told last. The fold trims what it has not lost.
    """

    def __init__(
        self,
        url: str,
        model: str,
        incarnation: str,
        capacity: int,
        logged: Callable[[int, int], None],
        broken: Callable[[], None],
    ) -> None:
        self._client = connect_blocking(url, timeout_s=10)
        self._broken = broken
        self._keys = Keys(model)
        self._incarnation = incarnation
        self._capacity = capacity
        self._logged = logged
        self._waiting: deque[StepAppend] = deque()
        # Steps that have been appended lately, and when (monotonic seconds).
        self._kept: deque[tuple[float, StepAppend]] = deque(maxlen=MOST_KEPT)
        self._run_id = ""
        self._asked_s = 0.0
        self._changed = threading.Condition()
        self._closed = False
        # Seconds the latest append took.
        self.append_s = 0.0
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, step: StepAppend) -> None:
        """Queue a step; waits while the outbox is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._capacity or self._closed)
            self._waiting.append(step)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Wait for what is queued, at most ``timeout_s``; False when something could not be appended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._waiting

    def _run(self) -> None:
        try:
            self._append_forever()
        except Exception:
            # Whatever it was, a thread that ended unnoticed would leave every step waiting for ever.
            logger.exception("the outbox is broken")
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._broken()

    def _append_forever(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            with self._changed:
                patience_s = _ASK_S if self._kept else None
                self._changed.wait_for(lambda: self._waiting or self._closed, patience_s)
                if self._closed and not self._waiting:
                    return
                batch = list(self._waiting)
            start = time.perf_counter()
            try:
                if self._append(batch):
                    steps = [step for _, step in self._kept]
                    logger.warning("Redis was restarted: what was appended in the last %g s goes there again", RESEND_S)
                    self._append([*steps, *batch])
            except (RedisError, OSError) as error:
                logger.warning("%d steps wait for the log (%s)", len(batch), error)
                self._asked_s = 0.0
                # Nothing that could come meanwhile helps: only Redis does, and it says nothing when it is back.
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
                continue
            retry_s = _FIRST_RETRY_S
            self._keep(batch)
            if not batch:
                continue
            self.append_s = time.perf_counter() - start
            with self._changed:
                for _ in batch:
                    self._waiting.popleft()
                self._changed.notify_all()
            self._logged(batch[-1].epoch, batch[-1].step)

    def _keep(self, batch: list[StepAppend]) -> None:
        now = time.monotonic()
        self._kept.extend((now, step) for step in batch if step.rows)
        while self._kept and now - self._kept[0][0] > RESEND_S:
            self._kept.popleft()

    def _append(self, batch: list[StepAppend]) -> bool:
        """One append per log and step. If it fails half-way, all is sent again: the fold trims what it knows.

        True: Redis is not the one it was, and may have lost what came before.
        """
        pipe = self._client.pipeline(transaction=False)
        for step in batch:
            by_log: dict[str, list[OutputRow]] = defaultdict(list)
            for row in step.rows:
                by_log[row.request_id.log].append(row)
            for log, rows in by_log.items():
                entry = encode_tokens(
                    rows, term=step.term, executor=self._incarnation, epoch=step.epoch, step=step.step
                )
                pipe.xadd(self._keys.log(log), {FIELD: entry})
        now = time.monotonic()
        if asks := now - self._asked_s >= _ASK_S:
            pipe.info("server")
        if not len(pipe):
            return False
        answers = pipe.execute()
        if not asks:
            return False
        self._asked_s = now
        before, self._run_id = self._run_id, answers[-1]["run_id"]
        return before not in ("", self._run_id)
