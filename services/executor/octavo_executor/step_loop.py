"""The executor's main loop: a plan in, a step done, its result out, its tokens into the outbox."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from octavo_executor.logged import LoggedMark
from octavo_executor.outbox import Outbox, StepAppend
from octavo_executor.page_names import PageNameTable
from octavo_executor.session import LineLost, Session
from octavo_executor.step_work import Launched
from octavo_shared.plan import NO_BYTES, NO_INTS, StepOutput, StepPlan, StepResult
from octavo_shared.wire import Farewell, Resync, Welcome

logger = logging.getLogger(__name__)

# How often a loop that has steps under way looks for a plan or for their results, whichever comes first.
POLL_S = 0.0001


class StepRunner(Protocol):
    """What carries plans out (``octavo_executor.runner.Runner``)."""

    @property
    def depth(self) -> int:
        """How many steps may be under way."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step."""
        ...

    def collect(self, step: Launched) -> StepOutput:
        """Wait for the oldest step under way."""
        ...

    def reset(self) -> None:
        """Forget every slot: a new epoch begins."""
        ...


@dataclass(frozen=True, slots=True)
class _UnderWay:
    plan: StepPlan
    launched: Launched
    wait_s: float
    queued_s: float


class StepLoop:
    """Carries plans out strictly in order (rule R1). A plan of another epoch or term, or out of order, is not run.

    A plan that is there is launched before the step before it is collected, where the runner has room for both: the device
    then goes from one step to the next without asking the host. Whatever else comes finds no step under way.
    """

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
        self._under_way: deque[_UnderWay] = deque()

    def run(self) -> None:
        """Work until the session is closed.

        Raises:
            RefusedError: the scheduler refuses this executor.
        """
        while True:
            if self._under_way and self._results_first():
                self._collect()
                continue
            if not self._under_way and not self._session.has_news:
                self._logged.idle()
            asked = time.perf_counter()
            arrived, message = self._session.receive()
            if isinstance(message, StepPlan) and self._follows(message):
                self._launch(message, wait_s=max(arrived - asked, 0.0), queued_s=max(asked - arrived, 0.0))
                continue
            self._collect_all()
            if message is None or isinstance(message, Farewell):
                return
            if isinstance(message, LineLost):
                self._line_lost()
            elif isinstance(message, Welcome):
                self._begin(message)
            else:
                self._refuse(message)

    def _results_first(self) -> bool:
        """Whether a step's results come before the next message; waits until either is there."""
        if len(self._under_way) >= self._runner.depth:
            return True
        while not self._session.has_news:
            if self._under_way[0].launched.ready:
                return True
            time.sleep(POLL_S)
        return False

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

    def _is_current(self, plan: StepPlan) -> bool:
        """Whether somebody waits for an answer: not if it is of a scheduler or an epoch that is over."""
        return plan.term == self._term and plan.epoch == self._epoch and not self._epoch_failed

    def _follows(self, plan: StepPlan) -> bool:
        return self._is_current(plan) and plan.step == self._next_step

    def _refuse(self, plan: StepPlan) -> None:
        if self._is_current(plan):
            self._epoch_failed = True
            reason = f"step {plan.step} came when step {self._next_step} was due"
            self._session.send(Resync(self._epoch, self._next_step, reason))

    def _launch(self, plan: StepPlan, *, wait_s: float, queued_s: float) -> None:
        self._logged.stepping()
        self._session.began()
        self._names.apply(plan)
        try:
            launched = self._runner.launch(plan)
        except Exception as error:
            self._collect_all()
            self._fail(plan, error)
            return
        self._under_way.append(_UnderWay(plan, launched, wait_s, queued_s))
        self._next_step += 1

    def _collect_all(self) -> None:
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        step = self._under_way.popleft()
        plan = step.plan
        try:
            output = self._runner.collect(step.launched)
        except Exception as error:
            self._under_way.clear()
            self._fail(plan, error)
            return
        timings = replace(
            output.result.timings, wait_s=step.wait_s, queued_s=step.queued_s, publish_s=self._outbox.append_s
        )
        self._session.send(replace(output.result, timings=timings, logged_step=self._logged.take()))
        self._outbox.put(StepAppend(plan.term, plan.epoch, plan.step, output.rows))
        # Only now: while the log is out of reach and the outbox full, this step lasts.
        self._session.done(plan.step)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        logger.error("step %d failed", plan.step, exc_info=error)
        # Who knows what it has written.
        self._names.clear()
        if self._epoch_failed:
            return
        self._epoch_failed = True
        self._session.at_rest(self._epoch)
        message = f"{type(error).__name__}: {error}"
        self._session.send(StepResult(plan.term, plan.epoch, plan.step, NO_INTS, NO_INTS, NO_BYTES, True, message))
