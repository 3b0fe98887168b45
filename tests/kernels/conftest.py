# isort: off
import octavo_executor  # noqa: F401 - before torch: it sets how long waiting threads spin

# isort: on
import sys
from pathlib import Path

import pytest
import torch

from octavo_kernels import choose_kernels
from octavo_kernels.interface import Kernels

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench" / "gpu")]


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def cpu() -> Kernels:
    return choose_kernels("cpu", head_dim=64, block_size=16, threads=2)


@pytest.fixture(scope="session")
def reference() -> Kernels:
    return choose_kernels("reference", head_dim=64, block_size=16)
