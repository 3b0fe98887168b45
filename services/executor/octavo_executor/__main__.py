"""``python -m octavo_executor``."""

import sys

from octavo_shared.entry import service_main
from octavo_shared.settings import ExecutorSettings


def run(settings: ExecutorSettings) -> int:
    """As ``octavo_executor.serve.run``, which is imported once the settings are known to be good: it takes seconds."""
    from octavo_executor.serve import run

    return run(settings)


if __name__ == "__main__":
    sys.exit(service_main("octavo_executor", ExecutorSettings, run))
