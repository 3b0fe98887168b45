"""How far the log has come, and how the scheduler hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from octavo_shared.wire import Logged


class LoggedMark:
    """Owns the newest logged step of the current epoch.

    A result that is sent carries it along, which costs nothing. While no step runs and no plan waits, no result will
    follow: then it is sent by itself, through ``send``. The outbox's thread calls ``note``, the step loop everything else.
    """

    def __init__(self, send: Callable[[Logged], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._epoch = 0
        self._newest = 0
        self._told = 0
        self._stepping = False

    def begin(self, epoch: int) -> None:
        """A new epoch: what was logged in earlier ones concerns nobody any more."""
        with self._lock:
            self._epoch, self._newest, self._told, self._stepping = epoch, 0, 0, False

    def note(self, epoch: int, step: int) -> None:
        """Everything up to ``step`` of ``epoch`` is in the logs now."""
        with self._lock:
            if epoch == self._epoch:
                self._newest = step
                self._tell_if_idle()

    def stepping(self) -> None:
        """A step begins: its result will carry the news."""
        with self._lock:
            self._stepping = True

    def idle(self) -> None:
        """No plan waits."""
        with self._lock:
            self._stepping = False
            self._tell_if_idle()

    def take(self) -> int:
        """The newest logged step (0: none), for a result about to be sent."""
        with self._lock:
            self._told = self._newest
            return self._newest

    def _tell_if_idle(self) -> None:
        if not self._stepping and self._newest > self._told:
            self._told = self._newest
            self._send(Logged(self._epoch, self._newest))
