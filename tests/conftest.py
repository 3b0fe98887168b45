"""For every test: GPU kernels are run by Triton's interpreter, threads that wait for each other sleep, and clients start quickly."""

import functools
import os
import sys
from pathlib import Path

import httpx
import pytest

# Helpers that several rooms use lie beside this file.
sys.path.insert(0, str(Path(__file__).parent))

# Triton's decorators look at this once, when Triton is first imported, which may be long before the kernels' own tests:
# transformers does it too.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Test processes that share the cores would spin against each other (libgomp's default).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Every new client, so every httpx.get, reads the authorities of the whole web: thirty times as long as to ask and be answered.
# One reading serves all clients.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow run only when a marker expression asks for them (``make test-slow``)."""
    if not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        if slow:
            config.hook.pytest_deselected(items=slow)
