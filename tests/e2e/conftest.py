"""Fixtures of the end-to-end tests: the default model, and stacks that serve it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.models import resolve_model

sys.path.insert(0, str(Path(__file__).parent))

from e2e_stack import Stack


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, converted once."""
    return resolve_model(None).path


@pytest.fixture(scope="session")
def start_stack(model_folder: Path) -> Iterator[Callable[..., Stack]]:
    """Start stacks on the default model with any flags; all are stopped in the end."""
    stacks: list[Stack] = []

    def start(*flags: str, environment: dict[str, str] | None = None) -> Stack:
        stack = Stack(str(model_folder), *flags, environment=environment)
        stacks.append(stack)
        return stack

    yield start
    for stack in stacks:
        stack.stop()


@pytest.fixture(scope="session")
def stack(start_stack: Callable[..., Stack]) -> Stack:
    """A stack with default settings that tests share; each leaves it idle."""
    return start_stack()


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow run only when a marker expression asks for them (``make test-slow``)."""
    if not config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        if slow:
            config.hook.pytest_deselected(items=slow)
