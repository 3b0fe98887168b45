"""The executor's main loop: a plan in, a step done, its result out, its tokens into the outbox."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Protocol

from octavo_executor.logged import LoggedMark
from octavo_executor.outbox import Outbox, StepAppend
from octavo_executor.page_names import PageNameTable
from octavo_executor.session import LineLost, Session
from octavo_shared.plan import NO_BYTES, NO_INTS, StepOutput, StepPlan, StepResult
from octavo_shared.wire import Farewell, Resync, Welcome

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What carries plans out (``octavo_executor.runner.Runner``)."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry one plan out."""
        ...

    def reset(self) -> None:
        """Forget every slot: a new epoch begins."""
        ...


class StepLoop:
    """Carries plans out strictly in order (rule R1). A plan of another epoch or term, or out of order, is not run."""

    def __init__(
        self, runner: StepRunner, session: Session, outbox: Outbox, logged: LoggedMark, names: PageNameTable
    ) -> None:
        """``logged`` is what the outbox reports to; ``names`` says what the runner's pages hold."""
        self._runner = runner
        self._session = session
        self._outbox = outbox
        self._logged = logged
        self._names = names
        self._term = 0
        self._epoch = 0
        self._next_step = 1
        # After a failed step the rest of the epoch is void.
        self._epoch_failed = False

    def run(self) -> None:
        """Work until the session is closed.

        Raises:
            RefusedError: the scheduler refuses this executor.
        """
        while True:
            if not self._session.has_news:
                self._logged.idle()
            asked = time.perf_counter()
            arrived, message = self._session.receive()
            if message is None or isinstance(message, Farewell):
                return
            if isinstance(message, LineLost):
                self._line_lost()
                continue
            if isinstance(message, Welcome):
                self._begin(message)
            elif self._follows(message):
                self._step(message, wait_s=max(arrived - asked, 0.0), queued_s=max(asked - arrived, 0.0))

    def _begin(self, welcome: Welcome) -> None:
        if welcome.term < self._term:
            logger.warning("a scheduler of term %d welcomes us, but term %d has spoken", welcome.term, self._term)
            return
        self._term, self._epoch, self._next_step, self._epoch_failed = welcome.term, welcome.epoch, 1, False
        self._session.at_rest(welcome.epoch)
        self._runner.reset()
        self._logged.begin(welcome.epoch)
        logger.info("attached in term %d, epoch %d", welcome.term, welcome.epoch)

    def _line_lost(self) -> None:
        """Whoever planned is gone, or thinks that we are: no plan that has come counts any more."""
        if self._session.draining:
            # Its sequences go on elsewhere, as after any loss.
            self._session.close()
            return
        self._epoch_failed = True
        self._session.park(self._names.offers())

    def _follows(self, plan: StepPlan) -> bool:
        if plan.term != self._term or plan.epoch != self._epoch:
            # Of a scheduler or an epoch that is over: nobody waits for an answer.
            return False
        if self._epoch_failed:
            return False
        if plan.step == self._next_step:
            return True
        self._epoch_failed = True
        reason = f"step {plan.step} came when step {self._next_step} was due"
        self._session.send(Resync(self._epoch, self._next_step, reason))
        return False

    def _step(self, plan: StepPlan, *, wait_s: float, queued_s: float) -> None:
        self._logged.stepping()
        self._session.began()
        self._names.apply(plan)
        try:
            output = self._runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            self._epoch_failed = True
            # Who knows what it has written.
            self._names.clear()
            self._session.at_rest(self._epoch)
            message = f"{type(error).__name__}: {error}"
            failure = StepResult(plan.term, plan.epoch, plan.step, NO_INTS, NO_INTS, NO_BYTES, True, message)
            self._session.send(failure)
            return
        timings = replace(output.result.timings, wait_s=wait_s, queued_s=queued_s, publish_s=self._outbox.append_s)
        self._session.send(replace(output.result, timings=timings, logged_step=self._logged.take()))
        self._next_step += 1
        self._outbox.put(StepAppend(plan.term, plan.epoch, plan.step, output.rows))
        # Only now: while the log is out of reach and the outbox full, this step lasts.
        self._session.done(plan.step)
