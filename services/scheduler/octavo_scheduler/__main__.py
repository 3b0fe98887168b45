"""``python -m octavo_scheduler``."""

import sys

from octavo_scheduler.serve import run
from octavo_shared.entry import service_main
from octavo_shared.settings import SchedulerSettings

if __name__ == "__main__":
    sys.exit(service_main("octavo_scheduler", SchedulerSettings, run))
