"""``python -m octavo_executor``."""

import sys
from collections.abc import Callable

from octavo_shared.entry import service_main
from octavo_shared.settings import ExecutorSettings


def load() -> Callable[[ExecutorSettings], int]:
    """``octavo_executor.serve.run``, which is imported once the settings are known to be good: it takes seconds."""
    from octavo_executor.serve import run

    return run


if __name__ == "__main__":
    sys.exit(service_main("octavo_executor", ExecutorSettings, load))
