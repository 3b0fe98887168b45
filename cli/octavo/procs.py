"""Small process helpers shared by the supervisor, the embedded log server and the model store."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel send `sig` to the child when its parent dies (Linux; None elsewhere).

    The signal is tied to the *thread* that forks: call `Popen` from a thread that lives as long as the
    child should (see prctl(2), PR_SET_PDEATHSIG).
    """
    if not sys.platform.startswith("linux"):
        return None
    # Loaded before the fork: between fork and exec a child of a threaded parent must not take locks.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent_pid = os.getpid()

    def preexec() -> None:
        prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the line above took effect
            os._exit(1)

    return preexec
