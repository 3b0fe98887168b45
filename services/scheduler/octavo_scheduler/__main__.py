"""``python -m octavo_scheduler``: a scheduler configured by environment variables alone."""

import sys

from octavo_scheduler.serve import run
from octavo_shared.settings import SchedulerSettings, load_settings

if __name__ == "__main__":
    sys.exit(run(load_settings(SchedulerSettings)))
