"""An executor whose steps take a given time, and hang when told to: heartbeats go on, the step never ends.

Settings come from the environment. PACE has seconds per step, per token and per sequence, comma separated; a step that begins
while the file HANG names exists lasts until that is gone.
"""

import os
import sys
import time
from pathlib import Path

from octavo_executor.runner import Runner
from octavo_executor.serve import run
from octavo_executor.step_work import Launched
from octavo_shared.plan import StepPlan
from octavo_shared.settings import ExecutorSettings, load_settings

STEP_S, TOKEN_S, SEQUENCE_S = map(float, os.environ.get("PACE", "0,0,0").split(","))
HANG = Path(os.environ["HANG"])
_launch = Runner.launch


def launch(runner: Runner, plan: StepPlan) -> Launched:
    time.sleep(STEP_S + TOKEN_S * int(plan.row_tokens.sum()) + SEQUENCE_S * len(plan.row_tokens))
    while HANG.exists():
        time.sleep(0.05)
    return _launch(runner, plan)


Runner.launch = launch  # type: ignore[method-assign]
sys.exit(run(load_settings(ExecutorSettings)))
