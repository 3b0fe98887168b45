"""``python -m octavo_executor``."""

import sys

from octavo_executor.serve import run
from octavo_shared.entry import service_main
from octavo_shared.settings import ExecutorSettings

if __name__ == "__main__":
    sys.exit(service_main("octavo_executor", ExecutorSettings, run))
