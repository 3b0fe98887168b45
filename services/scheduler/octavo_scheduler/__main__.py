"""``python -m octavo_scheduler``."""

import sys
from collections.abc import Callable

from octavo_shared.entry import service_main
from octavo_shared.settings import SchedulerSettings


def load() -> Callable[[SchedulerSettings], int]:
    """``octavo_scheduler.serve.run``, which is imported once the settings are known to be good: it takes seconds."""
    from octavo_scheduler.serve import run

    return run


if __name__ == "__main__":
    sys.exit(service_main("octavo_scheduler", SchedulerSettings, load))
