"""For every test: GPU kernels are run by Triton's interpreter, and threads that wait for each other sleep."""

import os
import sys
from pathlib import Path

import pytest

# Helpers that several rooms use lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

# Triton's decorators look at this once, when Triton is first imported, which may be long before the kernels' own tests:
# transformers does it too.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Test processes that share the cores would spin against each other (libgomp's default).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow run only when a marker expression asks for them (``make test-slow``)."""
    if not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        if slow:
            config.hook.pytest_deselected(items=slow)
