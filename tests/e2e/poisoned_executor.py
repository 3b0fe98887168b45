"""An executor that a certain prompt kills, as a fault of a kernel or of memory would: no warning, no goodbye.

Settings come from the environment; POISON has the token ids that a deadly prompt begins with, comma separated.
"""

import os
import signal
import sys

from octavo_executor.batch import BatchState
from octavo_executor.serve import run
from octavo_shared.plan import NewSequence
from octavo_shared.settings import ExecutorSettings, load_settings

POISON = [int(token) for token in os.environ["POISON"].split(",")]
_admit = BatchState._admit


def admit(state: BatchState, new: NewSequence) -> None:
    if new.tokens.tolist()[: len(POISON)] == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    _admit(state, new)


BatchState._admit = admit  # type: ignore[method-assign]
sys.exit(run(load_settings(ExecutorSettings)))
