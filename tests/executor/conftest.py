# isort: off
import octavo_executor  # noqa: F401 - before torch: it sets how long waiting threads spin

# isort: on
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(2)
