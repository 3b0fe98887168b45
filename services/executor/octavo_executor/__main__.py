"""``python -m octavo_executor``: an executor configured by environment variables alone."""

import sys

from octavo_executor.serve import run
from octavo_shared.settings import ExecutorSettings, load_settings

if __name__ == "__main__":
    sys.exit(run(load_settings(ExecutorSettings)))
